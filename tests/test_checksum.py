"""The NumPy checksum against HDF5's own, which stands behind a chunk's data in the file."""

import h5py
import numpy as np
import pytest

from kda_engine.hdf5.checksum import CHECKSUM_BYTES, fletcher32


def of_hdf5(data):
    """What HDF5 stores behind a chunk of these bytes."""
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data.shape, "u1", chunks=data.shape, fletcher32=True)
        dataset[...] = data
        file.flush()
        stored = dataset.id.read_direct_chunk((0,))[1]
    assert len(stored) == len(data) + CHECKSUM_BYTES
    return int.from_bytes(stored[-CHECKSUM_BYTES:], "little")


# Words of a row are 32,768; rows of a block 256.
SIZES = (1, 2, 3, 4, 721, 722, 65535, 65536, 65538, 3 * 65536 + 10, 1 << 20, (16 << 20) + 6)


@pytest.mark.parametrize("size", SIZES)
def test_equals_hdf5(size):
    random = np.random.default_rng(size)
    for data in (random.integers(0, 256, size, np.uint8), np.full(size, 255, np.uint8), np.zeros(size, np.uint8)):
        assert fletcher32(data) == of_hdf5(data)


def test_sums_that_vanish_modulo_65535_without_being_nothing():
    # One word of 65535; and words 1, 65533: their sum is 65534, weighted 65535.
    for words in ([65535], [65535] * 7, [1, 65533], [0, 65535, 0]):
        data = np.array(words, ">u2").view(np.uint8)
        assert fletcher32(data) == of_hdf5(data)


def test_finds_every_flipped_bit_and_exchanged_words():
    data = np.random.default_rng(0).integers(0, 256, 96, np.uint8)
    right = fletcher32(data)
    for bit in range(8 * len(data)):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        assert fletcher32(damaged) != right
    exchanged = data.copy()
    exchanged[:2], exchanged[2:4] = data[2:4], data[:2]
    assert fletcher32(exchanged) != right


def test_takes_anything_with_a_buffer():
    data = np.arange(1000, dtype="f4")
    assert fletcher32(data) == fletcher32(data.tobytes()) == fletcher32(memoryview(data.view(np.uint8)))
