"""Virtual datasets: made over other files, and checked whether they can be read as they stand.

They can when every value is mapped once, to a plain dataset of the same type.
Sources lie in the same file or in other HDF5 files. A source that is virtual itself, a number in a source's name (HDF5
looks for as many files as there are) and a mapping without fixed extent are refused.
"""

import math
import os

import numpy as np
from h5py import h5d, h5p, h5s

from ..errors import InputError
from . import types


def problem(dataset, plist, tree):
    """What is wrong with an h5py.Dataset's sources, as "what is expected, got ..."; None when all values are there.

    plist: its creation properties. tree: the `Tree` that it is of.
    """
    sources, covered, mapped = {}, None, 0
    for number in range(plist.get_virtual_count()):
        file, name = plist.get_virtual_filename(number), plist.get_virtual_dsetname(number)
        here, there = plist.get_virtual_vspace(number), plist.get_virtual_srcspace(number)
        if here.get_simple_extent_dims() != dataset.shape or not _is_block(here):
            return f"sources that map blocks of {dataset.shape}, got another selection from {file}"
        if (file, name) not in sources:
            sources[file, name] = _source(tree, file, name, types.float_dtype(dataset))
        shape, trouble = sources[file, name]
        if trouble is not None:
            return trouble
        if not _lies_within(there, shape, here.get_select_npoints()):
            return f"the source {file}: {name} with all the values that are mapped, got shape {shape}"
        mapped += here.get_select_npoints()
        covered = here if covered is None else covered.combine_select(here, h5s.SELECT_OR)
    total = dataset.id.get_space().get_simple_extent_npoints()
    found = 0 if covered is None else covered.get_select_npoints()
    if found < total:
        return f"a source for each of its {total} values, got sources for {found}"
    return None if mapped == total else f"one source for each of its {total} values, got {mapped} mapped values"


def create(group, name, shape, dtype, sources):
    """A dataset whose rows lie in other files; rows without a file read as NaN.

    sources: (file name relative to this file's folder, dataset name there, first row here, rows) for each part.
    """
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, "f4"))
    for file, dataset, start, rows in sources:
        here = h5s.create_simple(shape)
        here.select_hyperslab((start,) + (0,) * (len(shape) - 1), (rows,) + shape[1:])
        there = h5s.create_simple((rows,) + shape[1:])
        # In a source's name % begins a format, and %% is %.
        properties.set_virtual(here, os.fsencode(file.replace("%", "%%")), dataset.encode(), there)
    parent, _, leaf = name.rpartition("/")
    parent = group.require_group(parent) if parent else group
    h5d.create(parent.id, leaf.encode(), types.file_type(dtype), h5s.create_simple(shape), properties)


def _is_block(space):
    """Turns the selection of all into the block that it is; whether the selection is a regular one."""
    if space.get_select_type() == h5s.SEL_ALL:
        dims = space.get_simple_extent_dims()
        space.select_hyperslab((0,) * len(dims), dims)
    return space.get_select_type() == h5s.SEL_HYPERSLABS and space.is_regular_hyperslab()


def _lies_within(space, shape, points):
    """Whether a selection of so many points in a source lies within the source's shape.

    The file keeps no extent beside a selection: that of all values is of as many as there are.
    """
    if space.get_select_type() == h5s.SEL_ALL:
        return math.prod(shape) == points
    _, last = space.get_select_bounds()
    return len(last) == len(shape) and all(at < length for at, length in zip(last, shape))


def _source(tree, file, name, dtype):
    """(shape, None) of a source that can be read, else (None, what is wrong with it)."""
    label = f"{file}: {name}"
    if file == ".":
        return _plain(tree, label, name, dtype)
    if "%" in file.replace("%%", ""):
        return None, f"sources with fixed names, got {file!r}"
    prefix = os.environ.get("HDF5_VDS_PREFIX")
    try:
        other = tree.open_other(file.replace("%%", "%"), [prefix] if prefix else [])
    except InputError as error:
        return None, f"a source that can be read, got: {error}"
    if other is None:
        return None, f"the source {label} of its values, got nothing"
    with other:
        return _plain(other, label, name, dtype)


def _plain(tree, label, name, dtype):
    try:
        source = tree.dataset(name, may_be_virtual=False)
    except InputError as error:
        return None, f"a source that can be read, got: {error}"
    if source is None:
        return None, f"the source {label} of its values, got nothing"
    found = types.float_dtype(source)
    return (source.shape, None) if found == dtype else (None, f"the source {label} of type {dtype}, got {found}")
