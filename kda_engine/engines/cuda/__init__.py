"""The CUDA engine: every stage by kernel, along one of a few paths. CuPy is needed from the import of this package on."""

from .engine import CudaEngine

__all__ = ["CudaEngine"]
