"""What this machine and installation offer, without starting MPI."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from threadpoolctl import ThreadpoolController

from kda_engine.engines import cuda_usable
from kda_engine.engines.host import thread_count
from kda_engine.hdf5.version import hdf5_version
from kda_engine.version import VERSION

from .resources import memory_available

PACKAGES = ("numpy", "ml_dtypes", "h5py", "mpi4py", "mpich", "openmpi", "safetensors", "threadpoolctl", "cupy-cuda13x",
            "cupy-cuda12x")

# Asks the MPI library for its name without initialising it, in a process of its own: a broken one may abort.
_ASK_MPI = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
            "print(MPI.Get_library_version().split('\\n')[0].strip('\\0 '))")


def describe():
    """The environment as nested dicts of plain values; None for what is not there, {"error": text} for what fails."""
    return {
        "kda-engine": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0)),
                "threads": thread_count()},
        "memory": {"available_bytes": memory_available()},
        "packages": {name: _installed(name) for name in PACKAGES},
        "blas": [{key: pool.get(key) for key in ("internal_api", "version", "num_threads", "architecture")}
                 for pool in ThreadpoolController().info()],
        "hdf5": hdf5_version(),
        "mpi": {"library": _mpi_library(), "mpirun": shutil.which("mpirun")},
        "gpu": _gpu(),
        "engine_auto": "cuda" if cuda_usable() else "numpy",
    }


def _installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return lines[0] if lines else platform.machine()
    except OSError:
        return platform.machine()


def _mpi_library():
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return {"error": "no answer within 30 s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return done.stdout.strip()


def _gpu():
    try:
        import cupy
    except ImportError:
        return None
    # Without a device or driver CuPy raises errors of its own kinds, which say why.
    try:
        runtime = cupy.cuda.runtime
        devices = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
        return {"cupy": cupy.__version__, "driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion(),
                "devices": [{"name": device["name"].decode(), "memory_bytes": device["totalGlobalMem"],
                             "capability": f"{device['major']}.{device['minor']}"} for device in devices]}
    except Exception as error:
        return {"cupy": cupy.__version__, "error": f"{type(error).__name__}: {error}"}
