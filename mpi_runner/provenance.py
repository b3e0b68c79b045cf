"""Who made a file, with what: what can be said without MPI."""

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

from kda_engine.version import VERSION


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


def commit():
    """The source tree's commit, None outside a checkout."""
    git = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".git")
    try:
        with open(os.path.join(git, "HEAD")) as file:
            head = file.read().strip()
        if not head.startswith("ref: "):
            return head
        with open(os.path.join(git, head.removeprefix("ref: "))) as file:
            return file.read().strip()
    except OSError:
        return None
