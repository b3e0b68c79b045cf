"""Small problems through every kernel, for compute-sanitizer: as in
`compute-sanitizer --tool memcheck python -m tests.gpu.sanitize`.

CuPy's pool is off, so that every array is an allocation of its own.
"""

import sys
from dataclasses import replace
from pathlib import Path

import cupy

import kda_engine as kda
from kda_engine import cases
from kda_engine.device.plans import fused as chain_plan
from kda_engine.device.plans import portable as plan
from kda_engine.device.device import current
from kda_engine.engines.cuda import CudaEngine

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from decay_run import measured, pieces  # noqa: E402
from gates import gated  # noqa: E402
from stages import gradients, stages  # noqa: E402


def problems():
    for dtype in ("bfloat16", "float32"):
        for K, V in ((64, 64), (128, 128), (200, 40), (65, 129)):
            yield cases.make("packed", dtype=dtype, heads=1, value_heads=2, K=K, V=V, lengths=(33, 0, 16, 5))
        yield cases.make("ragged", dtype=dtype, K=128, V=128)
        yield cases.make("softplus-logit2", dtype=dtype, K=128, V=128, lengths=(1, 3, 0))
    # Of the fused kernels what those leave out: several cuts of a sequence, levels, the certified skip.
    for reach in (1.0, 300.0):
        for value_heads in (1, 2):
            yield gated("softplus", reach, "bfloat16", heads=1, value_heads=value_heads, lengths=(81, 0, 20))
    for case in (cases.make("strong", dtype="float16", heads=1, K=128, V=128, tokens=130),
                 gated("log", 1.0, "float16", least=2.0, heads=1, tokens=130)):
        yield replace(case, options=replace(case.options, tolerance=1e-6))


def convolve():
    """The short convolution and its adjoint, with halos and sequences shorter than them."""
    random = cupy.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape, dtype="f4")
    for taps in (1, 4, 18):
        x, weight, bias, halo = normal(60, 130), normal(130, taps), normal(130), normal(5, taps - 1, 130)
        y = kda.short_conv(x, weight, bias, "silu", [0, 0, 1, 3, 20, 60], halo)
        kda.short_conv_backward(y, x, weight, bias, "silu", [0, 0, 1, 3, 20, 60], halo)


def main():
    cupy.cuda.set_allocator(None)
    convolve()
    whole = plan.span_length, chain_plan.choose
    cut = (lambda *given: 1), (lambda *given: (2, 128))
    for plan.span_length, chain_plan.choose in (whole, cut):
        current().forget()
        for case in problems():
            stages(CudaEngine(), case)
            gradients(CudaEngine(), case)
            for piece, _ in pieces(case):
                measured(CudaEngine(), piece, case.options)


if __name__ == "__main__":
    main()
