"""The CUDA engine: every stage by kernel, along one of a few paths. Importing this package imports CuPy."""

from .engine import CudaEngine

__all__ = ["CudaEngine"]
