"""New goldens, and what they change."""

import os
import shlex

import numpy as np

from kda_engine import cases
from kda_engine.compare import difference
from kda_engine.errors import InputError
from kda_engine.evaluation import reference
from kda_engine.hdf5 import schema
from kda_engine.hdf5.golden import GoldenError, read_golden, write_golden
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.manifest import record

from ..provenance import provenance, uncommitted


def refuse_dirty_tree():
    """Raises InputError when the packages run from a checkout with changes that its commit does not hold."""
    changed = uncommitted()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise InputError(f"golden: expected a source tree without uncommitted changes, so that the golden's commit "
                         f"says what made it, got {', '.join(changed[:3])}{more}")


def read_source(source, given):
    """The `cases.Case` of a case's name or an input file. given: size, type and seed of a named case.

    Raises InputError.
    """
    if not os.path.exists(source) and not source.endswith(".h5"):
        return cases.make(source, **given)
    if given:
        raise InputError(f"--{min(given)}: expected only with a named case, got the file {source}")
    with InputFile(source) as file:
        return file.read_case(os.path.splitext(os.path.basename(source))[0])


def make(source, output, given, force):
    """Write the golden of `source` and bring its folder's manifest up to date; returns lines that say what it holds.

    Raises InputError, also when `output` is there and not `force`; the message then says what would change.
    """
    case = read_source(source, given)
    results = reference(case)
    changes = describe_changes(output, case, results) if os.path.lexists(output) else []
    if changes and not force:
        raise InputError("\n".join([f"{output}: exists; --force replaces it. What would change:", *changes]))
    write_golden(output, case, results, provenance(("numpy", "h5py", "ml_dtypes")), force)
    text = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
    flags = [f"--{name.replace('_', '-')}={text(value)}" for name, value in given.items()]
    record(output, case.name, shlex.join(
        ["kda-engine", "golden", "new", source, os.path.basename(output), *flags]))
    return [f"{output}: {case.name}, {len(results)} tensors, {os.path.getsize(output)} bytes", *changes]


def describe_changes(path, case, results):
    """Lines: how the golden at `path` differs from one of `case` with `results`."""
    try:
        old = read_golden(path)
    except GoldenError as error:
        return [f"  replaces what is no golden: {error}"]
    lines = [f"  {name}: {getattr(old.case.options, name)} -> {getattr(case.options, name)}"
             for name in schema.OPERATOR_OPTIONS if getattr(old.case.options, name) != getattr(case.options, name)]
    lines += [f"  {name}: {getattr(old.case, name)} -> {getattr(case, name)}" for name in ("name", "repeated_keys")
              if getattr(old.case, name) != getattr(case, name)]
    for name in (*schema.PER_TOKEN, *schema.PARAMETERS, *schema.STATES):
        lines += _change(f"inputs/{name}", getattr(old.case, name), getattr(case, name))
    for name in (*results, *(name for name in old.results if name not in results)):
        lines += _change(name, old.results.get(name), results.get(name))
    return lines or ["  nothing: the same inputs and the same results"]


def _change(name, old, new):
    """A line if the two arrays (or None) differ."""
    form = lambda x: "absent" if x is None else f"{x.dtype.name} {x.shape}"
    if form(old) != form(new):
        return [f"  {name}: {form(old)} -> {form(new)}"]
    if old is None or np.array_equal(old, new, equal_nan=True):
        return []
    found = difference(new, old)
    return [f"  {name}: relative change {found.relative:.2e}, largest {found.peak:.2e} of the largest value"]
