"""The table of the probes: kernels that measure parts of the fused chain (docs/kernels/probes.md). No engine runs them."""

from ...layout import CHUNK
from .fused import CHAIN_SHARED, CHAIN_SIZE
from .table import ELEMENTS, Defines, Kernel, hopper_variants, integers, pointers, reals

# Widths that `probe_products` times; threads of the probes that are blocks of the chain.
PROBE_WIDTHS = (8, 16, 32, 64, 128)
PROBE_THREADS = 512


def products_variant(width, warpgroups):
    """The variant of `probe_products` for products of so many columns, by 1 or 2 warpgroups."""
    return Defines((("KDA_WIDTH", width), ("KDA_WARPGROUPS", warpgroups)))


def roles_variant(prepares, carries):
    """The variant of `probe_roles` in which those sides of the chain work; `probe_peer` is the recurrence alone."""
    return Defines((("KDA_CHUNK", CHUNK), ("KDA_ELEMENT", ELEMENTS["bfloat16"]), ("KDA_BOUNDED", 1),
                    ("KDA_COLUMNS", CHAIN_SIZE), ("KDA_QUERIES", 1), ("KDA_REVERSED", 0),
                    ("KDA_SHARED_BYTES", CHAIN_SHARED), ("KDA_PREPARES", int(prepares)), ("KDA_CARRIES", int(carries))))


PROBES = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "probe_products", "probes/probe_products.cu", pointers("cycles", "sums") + integers("rounds"),
            variants=hopper_variants(*(products_variant(width, groups) for width in PROBE_WIDTHS for groups in (1, 2))),
            threads=lambda variant: 128 * dict(variant.defines)["KDA_WARPGROUPS"],
            shared=lambda variant: 0,
            blocks=lambda a: a["count"],
        ),
        Kernel(
            "probe_roles", "probes/probe_roles.cu",
            pointers("raw", "beta", "A_log", "dt_bias", "out", "final_state", "sums", "cycles") + integers("chunks")
            + reals("lower_bound", "scale"),
            variants=hopper_variants(roles_variant(True, False), roles_variant(False, True), roles_variant(True, True)),
            threads=lambda variant: PROBE_THREADS,
            shared=lambda variant: CHAIN_SHARED,
            blocks=lambda a: a["count"],
        ),
        Kernel(
            "probe_peer", "probes/probe_peer.cu",
            pointers("raw", "beta", "A_log", "dt_bias", "out", "final_state", "cycles")
            + integers("chunks", "turns", "interval", "send") + reals("lower_bound", "scale"),
            variants=hopper_variants(roles_variant(False, True)),
            threads=lambda variant: PROBE_THREADS,
            shared=lambda variant: CHAIN_SHARED,
            # An even number: blocks come in pairs.
            blocks=lambda a: a["count"],
        ),
    )
}
