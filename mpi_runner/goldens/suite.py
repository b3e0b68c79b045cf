"""The whole set of named cases as goldens, at the sizes of somebody's kernel."""

import os
from dataclasses import replace

from kda_engine import cases
from kda_engine.errors import InputError
from kda_engine.hdf5.manifest import NAME

from .making import make

_OF_LENGTHS = ("tokens", "lengths")


def plan(given):
    """(case's name, arguments of `cases.make` beside the name) of every golden of the set, a list.

    given: sizes of all cases, by name, and dtype and seed. tokens: of all sequences of a case together; their lengths
    change in proportion, and empty sequences stay empty. Cases that are about lengths keep theirs. A case that differs
    from an earlier one in nothing but a size that is given is left out.
    Raises InputError.
    """
    if "value_heads" in given and "heads" not in given:
        raise InputError(f"--value-heads: expected together with --heads, got {given['value_heads']} alone")
    tokens = given.get("tokens")
    if tokens is not None and tokens < 1:
        raise InputError(f"--tokens: expected at least 1, got {tokens}")
    fixed = {name: value for name, value in given.items() if name != "tokens"}
    planned, seen = [], []
    for name, recipe in cases.RECIPES.items():
        changed = dict(fixed)
        if tokens is not None and not _is_about_lengths(recipe):
            changed |= _scaled(recipe.sizes, tokens)
        final = _with_sizes(recipe, changed)
        if final not in seen:
            seen.append(final)
            planned.append((name, changed))
    return planned


def make_suite(folder, given, force, tell):
    """Write the goldens of `plan` and their manifest into a folder, which is made where it is missing.

    tell: called with lines about each golden as soon as it is there. Raises InputError, before anything is written when
    one of the files exists and not `force`, and OSError.
    """
    planned = [(name, os.path.join(folder, f"{name}.h5"), changed) for name, changed in plan(given)]
    taken = [path for _, path, _ in planned if os.path.lexists(path)]
    if taken and not force:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise InputError(f"{taken[0]}{more}: exists; --force replaces it")
    os.makedirs(folder, exist_ok=True)
    # Goldens are entered into the manifest of a folder that keeps one.
    with open(os.path.join(folder, NAME), "a"):
        pass
    for name, path, changed in planned:
        tell(make(name, path, changed, force))
    return len(planned)


def _is_about_lengths(recipe):
    ordinary = cases.Recipe()
    of_lengths = {name: getattr(ordinary.sizes, name) for name in _OF_LENGTHS}
    return recipe.sizes != ordinary.sizes and replace(recipe, sizes=replace(recipe.sizes, **of_lengths)) == ordinary


def _scaled(sizes, tokens):
    """tokens or lengths that add up to `tokens`, as arguments of `cases.make`."""
    if sizes.lengths is None:
        return {"tokens": tokens}
    whole = sum(sizes.lengths)
    lengths = [0 if not length else max(1, length * tokens // whole) for length in sizes.lengths]
    longest = lengths.index(max(lengths))
    lengths[longest] = max(1, lengths[longest] + tokens - sum(lengths))
    return {"lengths": tuple(lengths)}


def _with_sizes(recipe, changed):
    """The recipe that `cases.make` follows; recipes that are equal make one and the same kind of problem."""
    sizes = {name: value for name, value in changed.items() if name in cases.Sizes.__dataclass_fields__}
    if "heads" in sizes and "value_heads" not in sizes:
        sizes["value_heads"] = sizes["heads"] * (recipe.sizes.value_heads // recipe.sizes.heads)
    if "lengths" in sizes:
        sizes["tokens"] = sum(sizes["lengths"])
    return replace(recipe, sizes=replace(recipe.sizes, **sizes))
