"""Results held against a golden: one verdict a tensor."""

from dataclasses import dataclass

import numpy as np

from kda_engine.compare import Comparison, Difference, block_starts, first_bad, tier_of
from kda_engine.hdf5.schema import STATE_RESULTS, TOKEN_RESULTS


@dataclass(frozen=True)
class Verdict:
    """What was found of one tensor.

    difference: None when it cannot be compared; `why` then says so. first_bad: index of the first value that is not
    finite or too far off, in a tensor that fails. blocks: (first rows [n], errors [n,heads]) of blocks of 64 tokens or
    of states, of one head each; of a parameter's gradient (0, [1,heads]), of a convolution's [1,channels].
    """

    name: str
    difference: Difference | None
    tolerance: float
    why: str | None = None
    first_bad: tuple | None = None
    blocks: tuple | None = None

    @property
    def passed(self):
        return self.difference is not None and self.difference.within(self.tolerance)


@dataclass(frozen=True)
class Judgement:
    """What was found of one golden: `verdicts`, the `error` that kept it from being used, or why the engine cannot
    compute it (`refused`; it then neither passes nor fails).

    path: the golden's. case: its case's name. by: whose results were held against it. tier: of `compare.TIERS`.
    cu_seqlens: the case's. skipped: tensors the golden has and the results need not have.
    """

    path: str
    by: str
    case: str = ""
    tier: str = ""
    cu_seqlens: np.ndarray | None = None
    verdicts: tuple = ()
    skipped: tuple = ()
    error: str | None = None
    refused: str | None = None

    @property
    def passed(self):
        return self.error is None and self.refused is None and all(verdict.passed for verdict in self.verdicts)

    @property
    def compared(self):
        """Tensors that both sides have, in one shape."""
        return sum(verdict.difference is not None for verdict in self.verdicts)


def judge(golden, results, by, tier=None, forward_will_do=False):
    """The `Judgement` of `results` (NumPy arrays by dataset name) by a `Golden`.

    by: for people, "engine numpy" or "out.h5". tier: one of `compare.TIERS`; None takes the one of the narrowest type
    among the golden's inputs and the results. forward_will_do: results without any gradient are judged as a forward.
    """
    if tier is None:
        tier = "bf16" if results and tier_of(*(x.dtype for x in results.values())) == "bf16" else golden.tier
    expected, skipped = golden.results, ()
    if forward_will_do and not any(name.startswith("grads/") for name in results):
        skipped = tuple(name for name in expected if name.startswith("grads/"))
    names = [name for name in expected if name not in skipped]
    verdicts = [_verdict(name, results.get(name), golden, by, tier) for name in names]
    verdicts += [Verdict(name, None, golden.tolerances[tier], "absent in the golden")
                 for name in results if name not in expected]
    return Judgement(golden.path, by, golden.case.name, tier, golden.case.cu_seqlens, tuple(verdicts), skipped)


def _verdict(name, x, golden, by, tier):
    tolerance, expected = golden.tolerances[tier], golden.results[name]
    if x is None:
        return Verdict(name, None, tolerance, f"absent in the results of {by}")
    if x.shape != expected.shape:
        return Verdict(name, None, tolerance, f"shape {x.shape}, expected {expected.shape}")
    if tier == "bitwise":
        expected = expected.astype(x.dtype)
    comparison = Comparison()
    comparison.add(x, expected, starts=_starts(name, golden))
    difference = comparison.result()
    bad = None if difference.within(tolerance) else first_bad(x, expected, tolerance)
    return Verdict(name, difference, tolerance, None, bad, blocks_of(name, comparison, lambda: (x, expected)))


def blocks_of(name, comparison, arrays):
    """`Verdict.blocks` of a tensor, from its `Comparison`; for the gradient of a parameter from the arrays themselves.

    arrays: called for the pair of them, NumPy, only where they are needed.
    """
    if name in (*TOKEN_RESULTS, *STATE_RESULTS):
        return comparison.blocks()
    whole = Comparison()
    x, expected = arrays()
    whole.add(x[None], expected[None], starts=[0])
    return whole.blocks()


def _starts(name, golden):
    if name in STATE_RESULTS:
        return range(len(golden.results[name]))
    return block_starts(golden.case.cu_seqlens) if name in TOKEN_RESULTS else None
