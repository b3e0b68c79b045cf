"""Scans over affine pairs: the state (or its gradient) at every boundary of a chain of segments."""


def prefix(pairs, initial):
    """The state behind each pair of a chain, first to last: S_out = M S_in + S from `initial`."""
    states = []
    for pair in pairs:
        initial = pair.apply(initial)
        states.append(initial)
    return states


def suffix(pairs, final):
    """The state gradient in front of each pair of a chain (D in place of S), found from last to first from `final`:
    dS_in = M^T dS_out + D. Returned in the chain's order."""
    gradients = []
    for pair in reversed(pairs):
        final = pair.apply_transposed(final)
        gradients.append(final)
    return gradients[::-1]
