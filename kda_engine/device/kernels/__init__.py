"""The kernel table: every kernel that a user's call may launch, by name. The probes have a table of their own."""

from . import fused, others, portable

KERNELS = {kernel.name: kernel for module in (portable, fused, others) for kernel in module.KERNELS}
