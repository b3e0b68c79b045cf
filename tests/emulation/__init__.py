"""The fused kernels in NumPy: every place where they round an operand, and the units that keep operands in range.

docs/kernels/emulation.md says what is emulated and what is not. Functions bear the names that the kernels have, and
constants come from the kernels' sources (`constants`).
"""
