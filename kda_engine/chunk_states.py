"""The states behind every block of so many tokens, as inference caches want them, from any engine.

Nothing but the inputs needs to be kept: the engine's summary goes from block to block, all sequences side by side.
"""

import numpy as np

from .arrays import array_module
from .layout import zero_states


def chunk_states(engine, operands, options, initial_state, every):
    """(sequence [M], token [M], states [M,HV,K,V]): states[i] is that of sequence[i] behind its first token[i] tokens.

    One for every whole block of `every` tokens, ordered by sequence, then token; sequence and token are NumPy int64.
    operands and initial_state (None: zeros) lie where the engine works, and so do the states.
    """
    module, bounds = array_module(operands.k), operands.cu_seqlens
    blocks = np.diff(bounds) // every
    sequence = np.repeat(np.arange(len(blocks)), blocks)
    first = np.cumsum(blocks) - blocks
    token = (np.arange(len(sequence)) - first[sequence] + 1) * every
    states = module.empty((len(sequence),) + operands.state_shape[1:], operands.state_dtype)
    # The longest first, so that those with a block left are the first ones at every step.
    order = np.argsort(-blocks, kind="stable")
    carried = zero_states(operands) if initial_state is None else initial_state[module.asarray(order)]
    for step in range(blocks.max(initial=0)):
        running = order[: np.count_nonzero(blocks > step)]
        block = _blocks(operands, bounds[running] + step * every, every)
        carried = engine.summarise(block, options, carried[: len(running)], transition=False).S
        states[module.asarray(first[running] + step)] = carried
    return sequence, token, states


def _blocks(operands, starts, length):
    """The tokens [start, start + length) of each start, each a sequence of its own."""
    if len(starts) == 1:
        return operands.slice_tokens(int(starts[0]), int(starts[0]) + length)
    tokens = (starts[:, None] + np.arange(length)).ravel()
    return operands.take_tokens(array_module(operands.k).asarray(tokens), np.arange(len(starts) + 1) * length)
