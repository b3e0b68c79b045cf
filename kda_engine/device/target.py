"""The devices kernels are built for: target names and the limits that shape a launch."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Target:
    """architecture: NVRTC's name. shared_limit: bytes of shared memory one block may have. multiprocessors: count.
    memory: bytes of device memory.
    """

    architecture: str
    shared_limit: int
    multiprocessors: int
    memory: int

    @property
    def hopper(self):
        """Whether kernels marked sm90_ run here."""
        return self.architecture == "sm_90a"


# The targets that every kernel is compiled for in the tests; multiprocessors and memory are those of common devices.
KNOWN = {
    target.architecture: target
    for target in (
        Target("sm_80", 163 * 1024, 108, 80 << 30),
        Target("sm_90a", 227 * 1024, 132, 80 << 30),
        Target("sm_100", 227 * 1024, 148, 180 << 30),
        Target("sm_120", 99 * 1024, 188, 96 << 30),
    )
}


def current():
    """The Target of CuPy's current device. Raises RuntimeError for a device older than compute capability 8.0."""
    import cupy

    return of_device(cupy.cuda.runtime.getDevice())


@cache
def of_device(device):
    """The Target of one device by number."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(device)
    major, minor = properties["major"], properties["minor"]
    if major < 8:
        raise RuntimeError(f"device {device}: expected compute capability 8.0 or later, got {major}.{minor}")
    suffix = "a" if (major, minor) == (9, 0) else ""
    return Target(f"sm_{major}{minor}{suffix}", properties["sharedMemPerBlockOptin"],
                  properties["multiProcessorCount"], properties["totalGlobalMem"])
