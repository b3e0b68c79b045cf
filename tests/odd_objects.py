"""Run as a program by test_fuzz_files: every command on objects that are no files, in every place of a file name.

Argument: a folder with in.h5, out.h5 and golden.h5. Prints two lines of JSON for each try: the command;
its exit code, what it wrote to standard error, whether the objects are what they were. A try has SECONDS; then the
process dies.
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys

from mpi_runner.__main__ import main as run_command

SECONDS = 60


def make_objects(folder):
    """Names of objects that no command can read or write, each with the endings that commands ask for."""
    makers = {"fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(os.path.basename(path), path),
              "null": lambda path: os.symlink("/dev/null", path), "zero": lambda path: os.symlink("/dev/zero", path),
              "tofifo": lambda path: os.symlink("fifo.h5", path),
              "socket": lambda path: socket.socket(socket.AF_UNIX).bind(path)}
    made = []
    for name, make in makers.items():
        for ending in (".h5", ".npz", ".safetensors"):
            make(os.path.join(folder, name + ending))
        made.append(os.path.join(folder, name))
    return made


def commands(folder, odd):
    good = lambda name: os.path.join(folder, name)
    new, h5 = good("new.h5"), f"{odd}.h5"
    yield "run", h5, new
    yield "run", good("in.h5"), h5, "--force"
    yield "run", good("in.h5"), h5, "--force", "--io", "shards"
    yield "run", good("in.h5"), h5
    yield "compare", h5, good("out.h5")
    yield "compare", good("out.h5"), h5
    yield "golden", "check", h5
    yield "golden", "check", "--output", h5, good("golden.h5")
    yield "golden", "new", good("in.h5"), h5, "--force"
    yield "golden", "upgrade", h5
    yield "input", "--case", "ordinary", h5, "--force"
    yield "input", "--from-text", h5, new
    yield "input", "--from", f"{odd}.npz", new
    yield "input", "--from", f"{odd}.safetensors", new
    yield "plan", "--input", h5


def main(folder):
    made = make_objects(folder)
    state = lambda: sorted((entry.name, entry.stat(follow_symlinks=False).st_mode, entry.inode())
                           for entry in os.scandir(folder))
    before = state()
    for odd in made:
        for command in commands(folder, odd):
            print(json.dumps(command), flush=True)
            signal.alarm(SECONDS)
            err = io.StringIO()
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
                try:
                    code = run_command(list(command))
                except SystemExit as end:
                    code = end.code
            signal.alarm(0)
            print(json.dumps([code, err.getvalue()[-2000:], state() == before]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
