"""What an engine cannot compute, by its own word."""

import numpy as np

from .errors import InputError


def refusal(engine, operands, options):
    """What the engine has against inputs of these types and head sizes, in words; None where it takes them.

    It is asked for none of the tokens, which costs little.
    """
    nothing = engine.take(operands.slice_tokens(0, 0))
    state = engine.take_array(np.zeros(nothing.state_shape, nothing.state_dtype))
    try:
        engine.forward(nothing, options, state, save=False)
    except InputError as error:
        return str(error)
    return None
