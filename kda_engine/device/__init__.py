"""The CUDA device: kernel sources, their build, the kernel table and the one launch path. CuPy is imported lazily."""
