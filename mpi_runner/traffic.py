"""Bytes that boundary exchanges put on the wire, in closed form, per rank and scan strategy."""

import numpy as np

SCANS = ("serial", "allgather", "exscan", "heads")


def boundary_bytes(segments, state, transition, scan, backward):
    """Bytes each rank sends for its boundaries, a list; with `exact` decay skip.

    segments: `partition.Segment`s. state: bytes of S [HV,K,V]; transition: bytes of M [HV,K,K]. backward: of the
    backward too. serial and allgather as they are built, exscan and heads as their algorithms need.
    """
    ranks = len(segments)
    passes_right = [segment.right is not None for segment in segments]
    passes_left = [segment.left is not None for segment in segments]
    whole = [segment.left is not None and segment.left is segment.right for segment in segments]
    if scan == "serial":
        return [state * (right + (left if backward else 0)) for right, left in zip(passes_right, passes_left)]
    if scan == "allgather":
        # The backward gathers D alone: the transitions were gathered by the forward.
        return [(ranks - 1) * (state * right + transition * both + (state * left if backward else 0))
                for right, left, both in zip(passes_right, passes_left, whole)]
    directions = 2 if backward else 1
    if scan == "exscan":
        # In round i a rank sends its composed pair to the one 2^i further on, if there is one.
        rounds = [sum(1 for i in range(ranks.bit_length()) if rank + (1 << i) < ranks) for rank in range(ranks)]
        back = rounds[::-1] if backward else [0] * ranks
        return [(ahead + behind) * (state + transition) for ahead, behind in zip(rounds, back)]
    # heads: all-to-all of 1/R of the heads to each rank and the scanned states back; the backward needs no M.
    share = directions * 2 * state + transition
    return [share * (ranks - 1) // ranks] * ranks


def parameter_bytes(HV, K, ranks):
    """Bytes each rank hands to the sum of dA_log [HV] and ddt_bias [HV,K], in float64."""
    return 8 * (HV + HV * K) if ranks > 1 else 0


def state_sizes(HV, K, V, dtype):
    """(bytes of S, bytes of M) of one boundary in the states' type."""
    width = np.dtype(dtype).itemsize
    return HV * K * V * width, HV * K * K * width
