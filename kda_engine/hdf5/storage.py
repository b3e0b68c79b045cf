"""Whether all values of a dataset are stored. HDF5 itself reads zeros, without a word, where they are not."""

import math
import os

from h5py import h5d, h5f

from . import virtual


def problem(dataset, tree, may_be_virtual=True):
    """What is wrong with where an h5py.Dataset has its values, as "what is expected, got ..."; None when all are there.

    tree: the `Tree` that the dataset is of. Values are not read: what a writer left out within a chunk is not seen.
    """
    if 0 in dataset.shape:
        return None
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if layout == h5d.VIRTUAL:
        return virtual.problem(dataset, plist, tree) if may_be_virtual else "values stored here, got a virtual dataset"
    if layout == h5d.CHUNKED:
        expected = math.prod(-(-length // chunk) for length, chunk in zip(dataset.shape, plist.get_chunk()))
        found = dataset.id.get_num_chunks()
        return None if found >= expected else f"all of its {expected} chunks, got {found}: others were never written"
    if plist.get_external_count():
        return _external_problem(dataset, plist, tree)
    if layout == h5d.CONTIGUOUS and dataset.id.get_offset() is None:
        return "values, got a dataset that was never written"
    return None


def _external_problem(dataset, plist, tree):
    if not tree.allow_external:
        return "values in this file, got external storage" + tree.hint
    # HDF5 itself knows no other place for a relative name than the working directory.
    here = os.path.dirname(os.path.abspath(dataset.file.filename))
    folder, found = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", here), 0
    for number in range(plist.get_external_count()):
        name, offset, size = plist.get_external(number)
        path = os.path.join(folder, os.fsdecode(name))
        if not os.path.isfile(path):
            return f"its external file {path}, got nothing or no regular file"
        there = max(os.path.getsize(path) - offset, 0)
        found += there if size == h5f.UNLIMITED else min(size, there)
    needed = math.prod(dataset.shape) * dataset.id.get_type().get_size()
    return None if found >= needed else f"{needed} bytes in its external files, got {found}"
