"""The part of a piece that decides the state behind it once its past is dropped; and some heads of tensors."""

from kda_engine.layout import CHUNK

from .boundary import BACKWARD


def warmup(operands, decision, dropped, direction):
    """The tokens of the warm-up, a slice: the longest that any head of `dropped` asks for.

    Forward it ends with the piece, backward it starts with it.
    """
    longest = int(decision.num_warmup[dropped].max())
    if direction is BACKWARD:
        return slice(0, min(longest * CHUNK, operands.tokens))
    chunks = -(-operands.tokens // CHUNK)
    return slice((chunks - longest) * CHUNK, operands.tokens)


def heads_of(operands, heads):
    """Some heads of a problem; the problem itself when they are all there."""
    return operands if len(heads) == operands.value_heads else operands.take_heads(heads)


def values_of(x, heads):
    """Some heads of a tensor [T,HV,V]; the tensor itself when they are all there, for copies take milliseconds."""
    return x if len(heads) == x.shape[1] else x[:, heads]
