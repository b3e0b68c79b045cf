"""What this machine and installation offer, without starting MPI in this process."""

import json
import os
import platform
import shutil
import subprocess
import sys

from threadpoolctl import ThreadpoolController

from kda_engine.engines import cuda_usable
from kda_engine.hdf5.version import hdf5_version
from kda_engine.threads import thread_count
from kda_engine.version import VERSION

from .cuda_awareness import cuda_awareness
from .provenance import ROOT, package_version
from .resources import memory_available

PACKAGES = ("numpy", "ml_dtypes", "h5py", "mpi4py", "mpich", "openmpi", "safetensors", "threadpoolctl", "cupy-cuda13x",
            "cupy-cuda12x")

# Asks the MPI library in a process of its own: a broken one may abort.
_ASK_MPI = ("import json; from mpi4py import MPI; from mpi_runner.environment import mpi_library; "
            "print(json.dumps(mpi_library(MPI.COMM_WORLD)))")


def describe(mpi=None):
    """The environment as nested dicts of plain values; None for what is not there, {"error": text} for what fails.

    mpi: what `mpi_library` says, for who has started MPI; a process of its own is asked otherwise.
    """
    return {
        "kda-engine": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0)),
                "threads": thread_count()},
        "memory": {"available_bytes": memory_available()},
        "packages": {name: package_version(name) for name in PACKAGES},
        "blas": [{key: pool.get(key) for key in ("internal_api", "version", "num_threads", "architecture")}
                 for pool in ThreadpoolController().info()],
        "hdf5": hdf5_version(),
        "mpi": {**(_ask_mpi() if mpi is None else mpi), "mpirun": shutil.which("mpirun")},
        "gpu": _gpu(),
        "engine_auto": "cuda" if cuda_usable() else "numpy",
    }


def cpu_model():
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return lines[0] if lines else platform.machine()
    except OSError:
        return platform.machine()


def mpi_library(comm):
    """{"library": its own name and version, "cuda_aware": bool, "told_by": text} behind an mpi4py communicator."""
    return {"library": mpi_version(), **cuda_awareness(comm)}


def mpi_version():
    """The MPI library's own name and version; MPI must have been started."""
    from .mpi import MPI

    return MPI.Get_library_version().split("\n")[0].strip("\0 ")


def _ask_mpi():
    search = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=30,
                              env={**os.environ, "PYTHONPATH": search})
    except subprocess.TimeoutExpired:
        return {"library": {"error": "no answer within 30 s"}}
    if done.returncode:
        return {"library": {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}}
    return json.loads(done.stdout)


def gpus():
    """The GPUs that CuPy sees here, a list of plain values; empty where there is none or they cannot be asked."""
    return (_gpu() or {}).get("devices", [])


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
                             "capability": f"{device['major']}.{device['minor']}",
                             "pci": runtime.deviceGetPCIBusId(index), "paths": _paths(index)}
                            for index, device in enumerate(devices)]}
    except Exception as error:
        return {"cupy": cupy.__version__, "error": f"{type(error).__name__}: {error}"}


def _paths(index):
    """Names of the paths of engine "cuda" whose kernels run on a device; empty for one that is too old."""
    from kda_engine.engines.cuda.paths import on_device

    return on_device(index)
