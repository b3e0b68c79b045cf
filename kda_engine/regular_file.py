"""Whether a path leads to a regular file: opening anything else may wait for ever, or never end."""

import os
import stat

from .errors import InputError

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


def check_regular(path, expected="a file"):
    """Raise InputError, which says what was `expected`, unless `path` leads to a regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: expected {expected}, got nothing") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected {expected}, got: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: expected {expected}, got {what_is(mode)}")


def what_is(mode):
    """What a file of this mode (os.stat_result.st_mode) is, in words, when it is no regular one."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")
