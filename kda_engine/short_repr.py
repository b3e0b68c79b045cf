"""A result's text for people at a prompt: shapes and types in place of values."""

from dataclasses import fields


class ShortRepr:
    """For dataclasses made with repr=False: the public fields, of an array its type and shape alone.

    Needs no copy from a device, whatever an array holds.
    """

    def __repr__(self):
        named = (field.name for field in fields(self) if not field.name.startswith("_"))
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(getattr(self, name))}' for name in named)})"


def _shown(value):
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{getattr(value.dtype, 'name', value.dtype)}{list(value.shape)}"
    return repr(value)
