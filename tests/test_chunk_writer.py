"""An output file whose chunks several writers fill, each through a descriptor of its own."""

import errno
import os

import numpy as np
import pytest

from kda_engine.errors import InputError
from kda_engine.hdf5 import direct
from kda_engine.hdf5.chunk_writer import ChunkWriter
from kda_engine.hdf5.results import ResultFile, ResultWriter


def tensors():
    random = np.random.default_rng(0)
    return {"outputs/out": random.standard_normal((5000, 4, 128)).astype("f4"),
            "outputs/final_state": random.standard_normal((3, 4, 128, 128)).astype("f4"),
            "grads/dA_log": random.standard_normal(4).astype("f4"),
            "grads/dq": np.zeros((0, 4, 128), "f4")}


def fill(path, given, writers=2):
    with ResultWriter(path) as file:
        for name, x in given.items():
            file.create(name, x.shape, x.dtype, early=True)
        temporary, places = file.shared()
        assert set(places) == {name for name, x in given.items() if x.size}
        # The places of all chunks cost no room on the disk before they are written.
        assert 512 * os.stat(temporary).st_blocks < 1 << 20
        for number in range(writers):
            with ChunkWriter(temporary, places, threads=2) as writer:
                for name, place in places.items():
                    rows = place.chunk_rows
                    writer.write(name, ((chunk, given[name][chunk * rows : (chunk + 1) * rows])
                                        for chunk in range(number, len(place.offsets), writers)))
                writer.sync()
        file.finish({}, {})
    return places


def test_all_tensors_come_back_bit_by_bit(tmp_path):
    given = tensors()
    fill(tmp_path / "out.h5", given)
    with ResultFile(tmp_path / "out.h5") as file:
        for name, x in given.items():
            assert file.read(name).tobytes() == x.tobytes()


def test_chunks_of_different_writers_share_no_page(tmp_path):
    places = fill(tmp_path / "out.h5", tensors())
    assert len(places["outputs/out"].offsets) > 1
    for place in places.values():
        if place.chunk_bytes >= 1 << 16:
            assert not (place.offsets % 4096).any()


def test_a_flipped_bit_is_found(tmp_path):
    given, path = tensors(), tmp_path / "out.h5"
    places = fill(path, given)
    content = bytearray(path.read_bytes())
    content[places["outputs/out"].offsets[1] + 12345] ^= 1
    path.write_bytes(content)
    with ResultFile(path) as file, pytest.raises(InputError, match="checksum"):
        file.read("outputs/out")


def test_a_chunk_that_nobody_wrote_reads_as_zeros_with_a_right_checksum(tmp_path):
    path, x = tmp_path / "out.h5", np.ones((3000, 4, 128), "f4")
    with ResultWriter(path) as file:
        file.create("outputs/out", x.shape, x.dtype, early=True)
        file.finish({}, {})
    with ResultFile(path) as file:
        assert not file.read("outputs/out").any()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        fill(tmp_path / "out.h5", tensors())
    assert not list(tmp_path.iterdir())
