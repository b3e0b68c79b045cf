"""Result files: slabs in, the same tensors out, and a name that appears only when everything is on disk."""

import os
import signal
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest

from kda_engine import InputError
from kda_engine.arrays import BFLOAT16
from kda_engine.hdf5.results import ResultFile, ResultWriter
from kda_engine.hdf5.shards import ShardWriter, remove_shards, shard_folder

TYPES = [BFLOAT16, np.dtype("f2"), np.dtype("f4"), np.dtype("f8")]


def values(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def write_one(path, rows, force=False, **report):
    with ResultWriter(path, force=force) as writer:
        writer.create("outputs/out", rows.shape, rows.dtype)
        writer.write("outputs/out", 0, rows)
        writer.finish(report, {"ranks": 1})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_slabs_make_the_whole(tmp_path, dtype, monkeypatch):
    # Small chunks, so that slabs cross and share them.
    monkeypatch.setattr("kda_engine.hdf5.types.CHUNK_BYTES", 1 << 9)
    out, state = values((103, 3, 8), dtype), values((2, 3, 8, 4), "f4")
    with ResultWriter(tmp_path / "out.h5") as writer:
        writer.create("outputs/out", out.shape, dtype)
        writer.create("outputs/final_state", state.shape, "f4")
        writer.create("grads/dA_log", (3,), "f8")
        for start, stop in ((50, 103), (0, 1), (1, 50)):
            writer.write("outputs/out", start, out[start:stop])
        writer.write("outputs/final_state", 1, state[1:])
        writer.write("outputs/final_state", 0, state[:1])
        writer.write("grads/dA_log", 0, np.arange(3.0))
        assert os.listdir(tmp_path) != ["out.h5"]
        writer.finish({"phases": {"read": 0.5}, "text": "τ"}, {"commit": "abc"})
    assert os.listdir(tmp_path) == ["out.h5"]
    with ResultFile(tmp_path / "out.h5") as file:
        assert file.kind == "output"
        assert file.tensors() == ("outputs/out", "outputs/final_state", "grads/dA_log")
        assert file.read("outputs/out").dtype == dtype
        assert file.read("outputs/out").tobytes() == out.tobytes()
        assert file.read_rows("outputs/out", 7, 60).tobytes() == out[7:60].tobytes()
        assert np.array_equal(file.read("outputs/final_state"), state)
        assert file.report == {"phases": {"read": 0.5}, "text": "τ"} and file.provenance == {"commit": "abc"}


def test_tensors_without_elements(tmp_path):
    write_one(tmp_path / "out.h5", np.empty((0, 2, 4), BFLOAT16))
    with ResultFile(tmp_path / "out.h5") as file:
        assert file.read("outputs/out").shape == (0, 2, 4) and file.dtype("outputs/out") == BFLOAT16


def test_non_contiguous_rows_are_written_in_order(tmp_path):
    rows = values((4, 8, 6), "f4").swapaxes(1, 2)
    write_one(tmp_path / "out.h5", rows)
    with ResultFile(tmp_path / "out.h5") as file:
        assert np.array_equal(file.read("outputs/out"), rows)


def test_report_and_provenance_may_be_long(tmp_path):
    long = {"ranks": ["a device name that goes on" * 4] * 2000}
    with ResultWriter(tmp_path / "out.h5") as writer:
        writer.finish(long, long)
    with ResultFile(tmp_path / "out.h5") as file:
        assert file.report == long and file.provenance == long


def test_an_unfinished_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        with ResultWriter(tmp_path / "out.h5") as writer:
            writer.create("outputs/out", (4, 1, 1), "f4")
            raise RuntimeError("stop")
    assert os.listdir(tmp_path) == []


def test_existing_outputs_are_kept_without_force(tmp_path):
    path = tmp_path / "out.h5"
    write_one(path, values((4, 1, 2), "f4"), run=1)
    before = path.read_bytes()
    with pytest.raises(InputError, match="force"):
        ResultWriter(path)
    assert path.read_bytes() == before
    write_one(path, values((4, 1, 2), "f4"), force=True, run=2)
    with ResultFile(path) as file:
        assert file.report == {"run": 2}
    assert os.listdir(tmp_path) == ["out.h5"]


def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "out.h5"
    with ResultWriter(path) as writer:
        path.write_text("another's")
        with pytest.raises(InputError, match="existing"):
            writer.finish({}, {})
    assert path.read_text() == "another's" and os.listdir(tmp_path) == ["out.h5"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        ResultWriter(tmp_path / "nowhere" / "out.h5")


def test_names_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(InputError, match="a folder"):
        ResultWriter(tmp_path, force=True)
    with pytest.raises(InputError, match="too long"):
        ResultWriter(tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == []


def test_damaged_results_are_refused(tmp_path):
    path = tmp_path / "out.h5"
    out = values((64, 2, 8), "f4")
    write_one(path, out)
    good = path.read_bytes()
    place = good.find(out.tobytes()[:32])
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    with ResultFile(path) as file, pytest.raises(InputError, match="/outputs/out: .*checksum"):
        file.read("outputs/out")
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match="truncated"):
        ResultFile(path)
    path.write_bytes(good)
    with h5py.File(path, "r+") as file:
        del file["report/json"]
        file["report/json"] = "{"
    with pytest.raises(InputError, match="report"):
        ResultFile(path)
    with pytest.raises(InputError, match="nothing"):
        ResultFile(tmp_path / "absent.h5")


def test_results_written_with_h5py_alone(tmp_path):
    """Datasets are all that a reader needs; what is there beside them has to be right all the same."""
    path, out = tmp_path / "out.h5", values((64, 2, 8), "f4")
    with h5py.File(path, "w") as file:
        file["outputs/out"] = out
    with ResultFile(path) as file:
        assert (file.kind, file.report, file.provenance, file.cu_seqlens) == ("output", {}, {}, None)
        assert file.tensors() == ("outputs/out",) and np.array_equal(file.read("outputs/out"), out)
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "kda-engine"
    with pytest.raises(InputError, match="attribute format_version: expected 1, got None"):
        ResultFile(path)
    with h5py.File(path, "r+") as file:
        file.attrs.update({"format_version": 1, "kind": "input"})
    with pytest.raises(InputError, match="attribute kind"):
        ResultFile(path)
    with h5py.File(path, "r+") as file:
        file.attrs.update({"kind": "output", "provenance": "no JSON"})
    with pytest.raises(InputError, match="attribute provenance"):
        ResultFile(path)


# One process per limit: the disk fills at another place each time (a chunk, metadata, the close).
FULL_DISK = """
    import os, resource, sys
    import numpy as np
    from kda_engine.hdf5.results import ResultWriter
    path, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        with ResultWriter(path, force=True) as writer:
            for name in ("outputs/out", "grads/dq"):
                writer.create(name, (64, 64, 64), "f4")
                for start in range(0, 64, 8):
                    writer.write(name, start, np.ones((8, 64, 64), "f4"))
            writer.finish({"text": "x" * 5000}, {})
    except OSError as error:
        print(type(error).__name__, error.errno == 27, os.listdir(os.path.dirname(path)))
        sys.exit(70)
"""


@pytest.mark.parametrize("limit", [0, 100, 3000, 500_000, 1_048_576, 1_060_000, 2_097_152, 2_100_000])
def test_a_full_disk_is_an_error_and_leaves_the_older_output(tmp_path, limit):
    path = tmp_path / "out.h5"
    write_one(path, values((4, 1, 2), "f4"), run=1)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FULL_DISK), str(path), str(limit)],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 70, (done.returncode, done.stderr)
    assert done.stdout == "OSError True ['out.h5']\n" and done.stderr == ""
    assert path.read_bytes() == before


def test_a_killed_writer_leaves_no_output(tmp_path):
    program = """
        import os, signal, sys
        import numpy as np
        from kda_engine.hdf5.results import ResultWriter
        writer = ResultWriter(sys.argv[1])
        writer.create("outputs/out", (8, 1, 1), "f4")
        writer.write("outputs/out", 0, np.ones((8, 1, 1), "f4"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "out.h5")], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.h5").exists()


def write_sharded(path, out, cuts, force=False):
    """`out` in one shard per cut interval; returns the shards."""
    folder, shards = shard_folder(path), []
    for rank, (start, stop) in enumerate(zip(cuts[:-1], cuts[1:])):
        with ShardWriter(folder, rank) as writer:
            writer.create("outputs/out", start, (stop - start,) + out.shape[1:], out.dtype)
            writer.write("outputs/out", 0, out[start:stop])
            shards.append(writer.finish())
    with ResultWriter(path, force=force) as writer:
        writer.create("outputs/final_state", (1, 1, 2, 2), "f4")
        writer.write("outputs/final_state", 0, np.ones((1, 1, 2, 2), "f4"))
        writer.link_shards(shards, {"outputs/out": out.shape}, {"outputs/out": out.dtype})
        writer.finish({}, {})
    return shards


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_shards_read_as_one_tensor(tmp_path, dtype, monkeypatch):
    out = values((50, 3, 4), dtype)
    write_sharded(tmp_path / "out.h5", out, [0, 20, 20, 21, 50])
    monkeypatch.chdir("/")
    with ResultFile(tmp_path / "out.h5") as file:
        assert file.tensors() == ("outputs/out", "outputs/final_state") and file.dtype("outputs/out") == dtype
        assert file.read("outputs/out").tobytes() == out.tobytes()
        assert file.read_rows("outputs/out", 15, 30).tobytes() == out[15:30].tobytes()


def test_shards_may_move_together(tmp_path):
    out = values((6, 2, 2), "f4")
    (tmp_path / "a").mkdir()
    write_sharded(tmp_path / "a" / "out.h5", out, [0, 2, 6])
    (tmp_path / "a").rename(tmp_path / "b")
    with ResultFile(tmp_path / "b" / "out.h5") as file:
        assert np.array_equal(file.read("outputs/out"), out)


def test_missing_and_changed_shards_are_refused(tmp_path):
    path, out = tmp_path / "out.h5", values((50, 3, 4), "f4")
    shards = write_sharded(path, out, [0, 20, 50])
    shard = tmp_path / shards[1].file
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(InputError, match="rank-0001.h5: .*checksum"):
        ResultFile(path)
    shard.unlink()
    with pytest.raises(InputError, match="rank-0001.h5: .*nothing"):
        ResultFile(path)
    # Without the check, the lost rows would at least not look like numbers.
    with h5py.File(path) as file:
        assert np.isnan(file["outputs/out"][20:]).all()


def test_replacing_a_sharded_output_removes_its_shards(tmp_path):
    path = tmp_path / "out.h5"
    write_sharded(path, values((8, 1, 2), "f4"), [0, 4, 8])
    shards = write_sharded(path, values((8, 1, 2), "f4", seed=1), [0, 8], force=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["out.h5", shards[0].file.split("/")[0]])
    write_one(path, values((8, 1, 2), "f4"), force=True)
    assert os.listdir(tmp_path) == ["out.h5"]


def test_a_shard_may_lose_its_folder_while_it_is_written(tmp_path):
    """Another rank failed first and rank 0 cleaned up."""
    folder = shard_folder(tmp_path / "out.h5")
    with ShardWriter(folder, 0) as writer:
        writer.create("outputs/out", 0, (4, 1, 1), "f4")
        remove_shards(folder)
    assert os.listdir(tmp_path) == []


def test_shards_of_an_abandoned_output_are_removed(tmp_path):
    folder = shard_folder(tmp_path / "out.h5")
    with ShardWriter(folder, 0) as writer:
        writer.create("outputs/out", 0, (4, 1, 1), "f4")
    assert os.listdir(folder) == []
    remove_shards(folder)
    assert os.listdir(tmp_path) == []
