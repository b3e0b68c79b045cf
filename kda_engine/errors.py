"""The one error that users of the engine are meant to catch."""


class InputError(ValueError):
    """An argument, option or file that cannot be used: says which, what was expected and what came."""
