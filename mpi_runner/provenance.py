"""Who made a file, with what: what can be said without MPI."""

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

from kda_engine.version import VERSION

# The folder of both packages: a checkout's root, or where they were installed.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def provenance(packages):
    """Engine version, commit, time, command line, platform and the versions of `packages`, as JSON values."""
    return {
        "engine_version": VERSION, "commit": commit(),
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}",
        **{name: package_version(name) for name in packages},
    }


def package_version(name):
    """The installed version of a package, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def uncommitted():
    """Files of the two packages that differ from the commit that `commit` names, a list; empty outside a checkout.

    Raises OSError when git cannot be asked.
    """
    if not os.path.exists(os.path.join(ROOT, ".git")):
        return []
    done = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", "--", "kda_engine", "mpi_runner"],
                          capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"git status failed: {done.stderr.strip()}")
    return [line[3:] for line in done.stdout.splitlines()]


def commit():
    """The source tree's commit, None outside a checkout."""
    git = os.path.join(ROOT, ".git")
    try:
        with open(os.path.join(git, "HEAD")) as file:
            head = file.read().strip()
        if not head.startswith("ref: "):
            return head
        with open(os.path.join(git, head.removeprefix("ref: "))) as file:
            return file.read().strip()
    except OSError:
        return None
