"""The GPU's clocks, and what holds them down, through NVML where `nvidia-ml-py` is installed."""

# NVML's names of what can lower the clocks, without their prefix.
REASONS = ("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown",
           "ApplicationsClocksSetting", "DisplayClockSetting")


def read_clocks(pci_bus_id):
    """{"sm_mhz", "memory_mhz", "celsius", "watts", "lowered_by"} of a device now; None where NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        in_force = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "lowered_by": [name for name in REASONS if in_force & getattr(pynvml, f"nvmlClocksThrottleReason{name}")],
        }
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
