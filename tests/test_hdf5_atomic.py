"""Which names a file may be written under, what is replaced there, and what the new file keeps of the old one."""

import os
import socket
import stat
import subprocess
import sys

import h5py
import numpy as np
import pytest
from test_hdf5_results import values, write_one, write_sharded

from kda_engine import InputError
from kda_engine.hdf5 import atomic
from kda_engine.hdf5.results import ResultFile, ResultWriter
from kda_engine.hdf5.shards import check_shard_folder

ROWS = values((4, 1, 2), "f4")


def reads(path):
    with ResultFile(path) as file:
        return np.array_equal(file.read("outputs/out"), ROWS)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_the_mode_of_a_replaced_file_is_kept(tmp_path, mode):
    path = tmp_path / "out.h5"
    path.write_text("older")
    path.chmod(mode)
    with ResultWriter(path, force=True) as writer:
        # Nobody reads in the meantime what the old file hid.
        made = next(p for p in tmp_path.iterdir() if p != path)
        assert stat.S_IMODE(made.stat().st_mode) & ~mode & 0o077 == 0
        writer.finish({}, {})
    write_one(path, ROWS, force=True)
    assert stat.S_IMODE(path.stat().st_mode) == mode and reads(path)


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_one(tmp_path / "out.h5", ROWS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.h5").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_group_of_a_replaced_file_are_kept(tmp_path):
    path = tmp_path / "out.h5"
    path.write_text("older")
    os.chown(path, 1234, 2345)
    write_one(path, ROWS, force=True)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link to a fifo", "link to a device", "link to a folder",
                                  "link to itself", "socket"])
def test_what_is_no_file_is_never_replaced(tmp_path, kind):
    path = tmp_path / "out.h5"
    target = tmp_path / "target" if kind.startswith("link") else path
    if "fifo" in kind:
        os.mkfifo(target)
    elif kind == "device":
        target = path = "/dev/null"
    elif kind == "link to a device":
        target = "/dev/null"
    elif "folder" in kind:
        target.mkdir()
    elif kind == "link to itself":
        target = path
    else:
        socket.socket(socket.AF_UNIX).bind(str(path))
    if kind.startswith("link"):
        os.symlink(target, path)
    before = os.lstat(path)
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError, match=f"{path}: expected a file name, got"):
        write_one(path, ROWS, force=True)
    after = os.lstat(path)
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("target", ["old.h5", "nothing.h5"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path, target):
    (tmp_path / "old.h5").write_text("older")
    (tmp_path / "old.h5").chmod(0o600)
    path = tmp_path / "out.h5"
    path.symlink_to(target)
    with pytest.raises(InputError, match="force"):
        write_one(path, ROWS)
    write_one(path, ROWS, force=True)
    assert not path.is_symlink() and reads(path)
    assert (tmp_path / "old.h5").read_text() == "older" and not (tmp_path / "nothing.h5").exists()
    if target == "old.h5":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["new.h5/", "new.h5/.", "new.h5/..", "", "nul\0.h5", "file.txt/out.h5", "x" * 250,
                                  "/proc/out.h5"])
def test_names_that_cannot_be_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    with pytest.raises(InputError, match="expected"):
        ResultWriter(name, force=True)
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_removed_working_directory_is_told(tmp_path):
    code = ("import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
            "from kda_engine import InputError\nfrom kda_engine.hdf5.results import ResultWriter\n"
            "try: ResultWriter('out.h5')\nexcept InputError as error: print(error)")
    (tmp_path / "gone").mkdir()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "gone")], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": root})
    assert "out.h5: expected" in done.stdout, done.stderr


def test_dots_are_read_as_the_system_reads_them(tmp_path):
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/in")
    write_one(tmp_path / "link" / ".." / "out.h5", ROWS)
    assert reads(tmp_path / "far" / "out.h5")


def test_a_fifo_that_appears_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "out.h5"
    with ResultWriter(path, force=True) as writer:
        os.mkfifo(path)
        with pytest.raises(InputError, match="a fifo"):
            writer.finish({}, {})
    assert os.listdir(tmp_path) == ["out.h5"]


def test_a_full_disk_is_no_fault_of_the_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(atomic, "_Sink", full)
    with pytest.raises(OSError, match="No space"):
        ResultWriter(tmp_path / "out.h5")


@pytest.mark.parametrize("name", ["x%%.h5", "50%.h5", "%d%b%%b.h5", "two words.h5", "new\nline.h5", "τ.h5",
                                  os.fsdecode(b"no \xff utf.h5")])
def test_shards_of_any_name_read_as_one(tmp_path, name):
    write_sharded(tmp_path / name, ROWS, [0, 3, 4])
    assert reads(tmp_path / name)
    with h5py.File(tmp_path / name) as file:
        # Other tools go through HDF5's virtual datasets, where % begins a format.
        assert np.array_equal(file["outputs/out"][()], ROWS)


def test_a_name_too_long_for_shards_is_told_before_the_work(tmp_path):
    check_shard_folder(tmp_path / ("x" * 230))
    with pytest.raises(InputError, match="too long"):
        check_shard_folder(tmp_path / ("x" * 240))
    assert os.listdir(tmp_path) == []
