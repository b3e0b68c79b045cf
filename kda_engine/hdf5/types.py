"""Floating-point datasets as raw bits: HDF5 never converts, because its conversions to bfloat16 are wrong.

HDF5 1.14 drops the mantissa carry when it narrows to bfloat16 and 2.0 rounds ties wrongly. So values go in and out in
the dataset's own type, and only NumPy casts. bfloat16 is HDF5's 16-bit float with 8 exponent bits (2.0's own bfloat16).
"""

import hashlib
import json

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from ..arrays import BFLOAT16, FLOAT_TYPES

# Large enough to stream well, small enough that a slab of a few rows does not read much beside itself.
CHUNK_BYTES = 4 << 20
# The most that is read of one dataset when a file is opened; larger ones cannot be what their names say.
MOST_AT_OPENING = 256 << 20
# A few chunks of each dataset, so that slabs that share a chunk do not bring it in twice.
CHUNK_CACHE_BYTES = 16 << 20

# (sign position, exponent position, exponent bits, mantissa position, mantissa bits), exponent bias.
_FIELDS = {
    BFLOAT16: ((15, 7, 8, 0, 7), 127),
    np.dtype("f2"): ((15, 10, 5, 0, 10), 15),
    np.dtype("f4"): ((31, 23, 8, 0, 23), 127),
    np.dtype("f8"): ((63, 52, 11, 0, 52), 1023),
}


def file_type(dtype):
    """The little-endian HDF5 type (h5py.h5t.TypeID) that stores `dtype`, one of arrays.FLOAT_TYPES or an integer."""
    if dtype != BFLOAT16:
        return h5t.py_create(np.dtype(dtype).newbyteorder("<"))
    bfloat16 = h5t.IEEE_F32LE.copy()
    # Fields before size: HDF5 refuses a size that the present fields do not fit in.
    bfloat16.set_fields(*_FIELDS[BFLOAT16][0])
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    return bfloat16


def float_dtype(dataset):
    """The NumPy type of a dataset's values, one of arrays.FLOAT_TYPES, or None for any other type."""
    stored = dataset.id.get_type()
    if stored.get_class() != h5t.FLOAT:
        return None
    plain = (h5t.NORM_IMPLIED, 0, 8 * stored.get_size())
    if stored.get_order() not in (h5t.ORDER_LE, h5t.ORDER_BE) or \
            (stored.get_norm(), stored.get_offset(), stored.get_precision()) != plain:
        return None
    layout = (stored.get_fields(), stored.get_ebias())
    return next((t for t in FLOAT_TYPES if t.itemsize == stored.get_size() and _FIELDS[t] == layout), None)


def chunk_shape(shape, itemsize):
    """Chunks of at most CHUNK_BYTES made of whole trailing axes; None for a dataset without elements or axes."""
    if 0 in shape or not shape:
        return None
    chunk, room = [], max(1, CHUNK_BYTES // itemsize)
    for length in reversed(shape):
        chunk.append(min(length, room))
        room = max(1, room // length)
    return tuple(reversed(chunk))


def create(group, name, shape, dtype, compress=False, early=False):
    """A new dataset (with the groups on its way) for values of `dtype`, in chunks under fletcher32.

    compress: gzip with byte shuffling, for small files that are kept. early: all chunks get their places now, so that
    they can be written beside the library (`direct.write_chunk`). Raises ValueError when the name is taken.
    """
    chunks = chunk_shape(shape, np.dtype(dtype).itemsize)
    filters = {} if chunks is None else {"chunks": chunks, "fletcher32": True}
    if compress and chunks is not None:
        filters |= {"compression": "gzip", "shuffle": True}
    properties = h5p.create(h5p.DATASET_CREATE)
    if early:
        properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    return group.create_dataset(name, shape, dtype=h5py.Datatype(file_type(dtype)), dcpl=properties, **filters)


def read_rows(dataset, dtype, start, stop):
    """Rows [start, stop) along the first axis as a new contiguous array; `dtype` is float_dtype(dataset)."""
    shape = (stop - start,) + dataset.shape[1:]
    bits = np.empty(shape, f"u{dtype.itemsize}")
    if bits.size:
        stored = dataset.id.get_type()
        dataset.id.read(*_spaces(dataset, start, shape), bits, stored)
        if stored.get_order() == h5t.ORDER_BE:
            bits.byteswap(inplace=True)
    return bits.view(dtype)


class Rows:
    """The rows of one open h5py.Dataset. shape: a tuple. dtype: as `float_dtype`."""

    def __init__(self, dataset):
        self._dataset = dataset
        self.shape, self.dtype = dataset.shape, float_dtype(dataset)

    def read(self, start, stop):
        """Rows [start, stop) as a new contiguous array."""
        return read_rows(self._dataset, self.dtype, start, stop)


def write_rows(dataset, start, rows):
    """Write `rows` (of the dataset's own type) from row `start` on."""
    if rows.size:
        bits = np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}")
        dataset.id.write(*_spaces(dataset, start, rows.shape), bits, dataset.id.get_type())


def put_text(attributes, name, text):
    """A text attribute of fixed length: HDF5 keeps other strings in a heap without checksums."""
    _create_text(attributes.create, name, _encoded(text))


def get_text(attributes, name):
    """A text attribute, of fixed or variable length, as str; None when absent or not text."""
    value = attributes.get(name)
    try:
        return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else None
    except UnicodeDecodeError:
        return None


def write_json(group, name, value):
    """`value` as one UTF-8 string dataset of JSON. Raises ValueError for NaN and infinities, which JSON has not.

    HDF5 keeps no checksum of a text, so its SHA-256 is an attribute of the dataset.
    """
    text = _encoded(json.dumps(value, ensure_ascii=False, allow_nan=False))
    _create_text(group.create_dataset, name, text)
    put_text(group[name].attrs, "sha256", hashlib.sha256(text).hexdigest())


def read_json(dataset):
    """The value that `write_json` stored. Raises TypeError or ValueError when there is none, or it was changed."""
    kind = h5py.check_string_dtype(dataset.dtype)
    if kind is None or dataset.shape != () or (kind.length or 0) > MOST_AT_OPENING:
        raise TypeError(f"expected one text, got {dataset.dtype} {dataset.shape}")
    text = dataset[()]
    sealed = get_text(dataset.attrs, "sha256")
    if sealed is not None and hashlib.sha256(text).hexdigest() != sealed:
        raise ValueError("expected the text of its checksum, got another")
    return json.loads(text)


def read_integers(dataset):
    """A whole dataset of integers [n]. Raises TypeError for another type or shape, ValueError for an absurd size."""
    stored = dataset.id.get_type()
    if stored.get_class() != h5t.INTEGER or stored.get_size() > 8 or len(dataset.shape) != 1:
        raise TypeError(f"expected integers with one axis, got another type or shape {dataset.shape}")
    check_size(dataset)
    return dataset[()]


def check_size(dataset):
    """Raise ValueError when a dataset that is read on opening is larger than it can be."""
    size = dataset.id.get_space().get_simple_extent_npoints() * dataset.id.get_type().get_size()
    if size > MOST_AT_OPENING:
        raise ValueError(f"expected at most {MOST_AT_OPENING} bytes, got shape {dataset.shape}: {size} bytes")


def _create_text(create, name, text):
    create(name, data=text, dtype=h5py.string_dtype("utf-8", max(1, len(text))))


def _encoded(text):
    # File names may hold bytes that are no UTF-8; written so, they are still what JSON reads back.
    return text.encode("utf-8", "backslashreplace")


def _spaces(dataset, start, shape):
    place = dataset.id.get_space()
    place.select_hyperslab((start,) + (0,) * (len(shape) - 1), shape)
    return h5s.create_simple(shape), place
