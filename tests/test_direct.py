"""Rows read and written beside the HDF5 library against the library itself."""

import os
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from kda_engine.arrays import FLOAT_TYPES
from kda_engine.errors import InputError
from kda_engine.hdf5 import direct, types

POOL = ThreadPoolExecutor(2)


@pytest.fixture
def descriptor_of():
    opened = []

    def open_at(path, flags=os.O_RDONLY):
        opened.append(os.open(path, flags))
        return opened[-1]

    yield open_at
    for descriptor in opened:
        os.close(descriptor)


def values(shape, dtype, seed=0):
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 200])
@pytest.mark.parametrize("checked", [True, False])
def test_rows_equal_those_of_the_library(tmp_path, descriptor_of, dtype, chunk_rows, checked):
    path, x = tmp_path / "x.h5", values((130, 3, 5), dtype)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", x.shape, h5py.Datatype(types.file_type(x.dtype)), fletcher32=checked,
                                      chunks=(min(chunk_rows, 130), 3, 5))
        types.write_rows(dataset, 0, x)
    with h5py.File(path) as file:
        places = direct.RowPlaces.of(file["x"])
        assert places.checked == checked
        for start, stop in ((0, 130), (0, 1), (129, 130), (6, 8), (7, 14), (63, 129), (5, 5)):
            rows = direct.read_rows(descriptor_of(path), places, start, stop, "x", POOL)
            expected = types.read_rows(file["x"], x.dtype, start, stop)
            assert rows.tobytes() == expected.tobytes() == x[start:stop].tobytes()


def test_contiguous_values(tmp_path, descriptor_of):
    path, x = tmp_path / "x.h5", values((50, 4), "f4")
    with h5py.File(path, "w") as file:
        file["x"] = x
    with h5py.File(path) as file:
        rows = direct.read_rows(descriptor_of(path), direct.RowPlaces.of(file["x"]), 9, 31, "x", POOL)
    assert rows.tobytes() == x[9:31].tobytes()


def test_what_the_library_has_to_read_is_told(tmp_path):
    x = values((50, 4), "f4")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = x
    layout = h5py.VirtualLayout((50, 4), "f4")
    layout[...] = h5py.VirtualSource(tmp_path / "other.h5", "x", (50, 4))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("big", data=x.astype(">f4"))
        file.create_dataset("gzip", data=x, chunks=(10, 4), compression="gzip", fletcher32=True)
        file.create_dataset("split", data=x, chunks=(10, 2))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (50, 4), "f4", external=str(tmp_path / "raw"))[...] = x
        file.create_dataset("nothing", (0, 4), "f4")
        file.create_dataset("unwritten", (50, 4), "f4")
        for name, part in (("big", "big-endian"), ("gzip", "compressed"), ("split", "split rows"),
                           ("virtual", "virtual"), ("external", "outside"), ("nothing", "no values"),
                           ("unwritten", "outside")):
            assert part in direct.obstacle(file[name])
            assert direct.RowPlaces.of(file[name]) is None
        missing = file.create_dataset("missing", (50, 4), "f4", chunks=(10, 4), fletcher32=True)
        missing[:20] = 1.0
        assert direct.RowPlaces.of(missing) is None
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file:
        file["x"] = x
        assert direct.RowPlaces.of(file["x"]) is None


def test_damage_and_a_cut_end_are_found_and_placed(tmp_path, descriptor_of):
    path, x = tmp_path / "x.h5", values((100, 8), "f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(10, 8), fletcher32=True)
    with h5py.File(path) as file:
        places = direct.RowPlaces.of(file["x"])
    whole = path.read_bytes()
    for byte in (0, 5, 319, 320, 323):  # of chunk 4's data and checksum
        damaged = bytearray(whole)
        damaged[places.offsets[4] + byte] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="x: expected data that match their checksum.*rows 40 to 50"):
            direct.read_rows(descriptor_of(path), places, 0, 100, "x", POOL)
        assert direct.read_rows(descriptor_of(path), places, 50, 100, "x", POOL).tobytes() == x[50:].tobytes()
    path.write_bytes(whole[: places.offsets.max() + 100])
    with pytest.raises(InputError, match="cut short at byte"):
        direct.read_rows(descriptor_of(path), places, 0, 100, "x", POOL)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_the_library_reads_what_was_written_directly(tmp_path, descriptor_of, dtype):
    path, x = tmp_path / "x.h5", values((130, 3, 5), dtype)
    with h5py.File(path, "w") as file:
        dataset = types.create(file, "group/x", x.shape, x.dtype, early=True)
        places = direct.RowPlaces.of(dataset)
        file.flush()
        for chunk in range(len(places.offsets)):
            first = chunk * places.chunk_rows
            direct.write_chunk(descriptor_of(path, os.O_WRONLY), places, chunk, x[first : first + places.chunk_rows])
    with h5py.File(path) as file:
        assert types.read_rows(file["group/x"], x.dtype, 0, len(x)).tobytes() == x.tobytes()
        assert file["group/x"].fletcher32


def test_a_poll_that_raises_stops_the_reading(tmp_path, descriptor_of):
    path, x = tmp_path / "x.h5", values((100, 8), "f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(1, 8), fletcher32=True)
    with h5py.File(path) as file:
        places = direct.RowPlaces.of(file["x"])

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        direct.read_rows(descriptor_of(path), places, 0, 100, "x", POOL, stop)
