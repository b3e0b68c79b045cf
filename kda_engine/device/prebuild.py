"""Fills the disk cache ahead of the first call: `python -m kda_engine.device.prebuild [sm_90a ...]`. Needs no GPU."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from .kernels import KERNELS
from .module import cubin_path
from .target import KNOWN, current


def prebuild(target):
    """Compile every kernel for a Target, in all variants, on all cores; those already in the cache are left alone."""
    jobs = {(kernel.file, variant.defines) for kernel in KERNELS.values() for variant in kernel.variants(target)}
    # NVRTC runs outside Python's global lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda job: cubin_path(*job, target.architecture), jobs):
            pass


if __name__ == "__main__":
    for target in [KNOWN[name] for name in sys.argv[1:]] or [current()]:
        prebuild(target)
