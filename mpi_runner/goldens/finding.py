"""Where goldens are: those that come with the program, and those of the files and folders that somebody names."""

import os
from pathlib import Path

from kda_engine.errors import InputError
from kda_engine.hdf5.manifest import read_manifest

_HERE = Path(__file__).resolve().parent
# A wheel holds the goldens beside this module; a checkout keeps them in data/ beside the packages.
_PLACES = (_HERE / "data", _HERE.parent.parent / "data")


def shipped():
    """The folder of the goldens that come with the program, a text. Of an installation without any, the place where
    they are missed.
    """
    return str(next((place for place in _PLACES if place.is_dir()), _PLACES[0]))


def find(names):
    """Paths of goldens, texts: files as they are named, in place of a folder those in it, and of those that came along
    their file name is enough. No names: all that came along.

    Raises InputError for a folder without goldens, GoldenError for a manifest that cannot be read.
    """
    if not names:
        return _listed(shipped())
    paths = []
    for name in names:
        if not os.path.isdir(name):
            own = os.path.join(shipped(), name)
            paths.append(own if not os.path.lexists(name) and os.path.isfile(own) else name)
            continue
        found = _listed(name) or sorted(str(path) for path in Path(name).glob("*.h5"))
        if not found:
            raise InputError(f"{name}: expected a folder with goldens, got one without any .h5 file")
        paths += found
    return paths


def _listed(folder):
    return [os.path.join(folder, name) for name in read_manifest(folder)]
