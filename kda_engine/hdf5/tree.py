"""The named objects of an open file, each judged before HDF5 opens it: what kind of link leads there, what it is, and
whether all of its values are there.

HDF5 follows links to devices and other files, crashes on damaged virtual datasets, and reads zeros where values were
never written. Nothing here reads a value.
"""

import os

import h5py
from h5py import h5i, h5l, h5o

from ..errors import InputError
from . import opening, storage
from .object_header import is_virtual

# As many links as HDF5 itself follows one after the other.
_MOST_LINKS = 16


def open_tree(path, kinds, trial, may_be_bare=False):
    """The `Tree` of the file at `path`, its root attributes checked (`opening.check_root`). Raises InputError."""
    file = opening.open_hdf5(path)
    try:
        opening.check_root(path, file, kinds, may_be_bare)
    except BaseException:
        file.close()
        raise
    return Tree(path, file, trial)


class Tree:
    """The groups and datasets of `file`, an open h5py.File, by names such as "inputs/conv/q_weight".

    path: for messages. trial: the `Trial` that is made before a virtual dataset is opened; it also says whether links to
    other files and values outside HDF5 files are followed. The methods raise InputError naming the file, the object,
    what was expected and what came.
    """

    def __init__(self, path, file, trial):
        self.path, self.file, self.allow_external = os.fspath(path), file, trial.allow_external
        self._trial, self._others, self._groups = trial, [], {}
        # Results are read by commands that have no such option.
        self.hint = " (--allow-external reads it)" if trial.reader == "inputs" else ""

    def names(self, group):
        """What a group's links are called, whatever they lead to; empty when nothing has the group's name."""
        found = self.group(group)
        return () if found is None else tuple(found)

    def group(self, name):
        """The h5py.Group, or None when nothing has the name."""
        found = self._find(name)
        if found is None or isinstance(found, h5py.Group):
            return found
        raise InputError(f"{self.path}: /{name}: expected a group, got {_what(found)}")

    def needed_group(self, name):
        """The same; InputError when nothing has the name."""
        return self._there(name, self.group(name), "a group")

    def dataset(self, name, may_be_virtual=True):
        """The h5py.Dataset with a shape and all values stored, or None when nothing has the name."""
        found = self._find(name)
        if found is None:
            return None
        if getattr(found, "shape", None) is None:
            raise InputError(f"{self.path}: /{name}: expected a dataset, got {_what(found)}")
        with opening.reading(self.path, f"/{name}"):
            # The sources of a virtual dataset that an external link leads to are none of this file's.
            problem = storage.problem(found, self, may_be_virtual and found.file == self.file)
        if problem is not None:
            raise InputError(f"{self.path}: /{name}: expected {problem}")
        return found

    def needed(self, name, may_be_virtual=True):
        """The same; InputError when nothing has the name."""
        return self._there(name, self.dataset(name, may_be_virtual), "a dataset")

    def open_other(self, name, prefixes):
        """The Tree of another file that this one names, for the caller to close; None when there is no such file.

        prefixes: folders to look in before this file's.
        """
        here = os.path.dirname(os.path.abspath(self.file.filename))
        places = [os.path.join(folder, name) for folder in (*prefixes, here, "")]
        found = next((place for place in places if os.path.lexists(place)), None)
        if found is None:
            return None
        return Tree(found, opening.open_hdf5(found), self._trial)

    def close(self):
        """Close this file and the others."""
        for other in self._others:
            other.close()
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _there(self, name, found, expected):
        if found is None:
            raise InputError(f"{self.path}: /{name}: expected {expected}, got nothing")
        return found

    def _find(self, name):
        with opening.reading(self.path, f"/{name}"):
            folder, _, leaf = name.rpartition("/")
            # One group holds many datasets.
            found = self._groups.get(folder)
            if found is None:
                found = self._follow(self.file["/"], folder, name, 0)
                if isinstance(found, h5py.Group):
                    self._groups[folder] = found
            return None if found is None else self._follow(found, leaf, name, 0)

    def _follow(self, group, name, asked, links):
        """The object that `name` leads to from an h5py.Group; None when a part of the name does not exist."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        for number, part in enumerate(parts):
            if not isinstance(group, h5py.Group):
                raise InputError(f"{self.path}: /{asked}: expected a group before {part!r}, got a dataset")
            encoded = os.fsencode(part)
            proxy = group.id.links
            if not proxy.exists(encoded):
                return None
            group = self._enter(group, proxy, encoded, asked, links)
        return group

    def _enter(self, group, proxy, name, asked, links):
        """The object behind one link."""
        link = proxy.get_info(name)
        if link.type == h5l.TYPE_HARD:
            # Another process opens first what HDF5 may crash on.
            if is_virtual(group.file, link.u) is not False:
                self._trial.make()
            return _object(h5o.open(group.id, name))
        if links == _MOST_LINKS:
            raise InputError(f"{self.path}: /{asked}: expected an object, got links that lead in a circle")
        if link.type == h5l.TYPE_SOFT:
            target = os.fsdecode(proxy.get_val(name))
            start = group.file["/"] if target.startswith("/") else group
            found = self._follow(start, target, asked, links + 1)
        elif link.type == h5l.TYPE_EXTERNAL:
            if not self.allow_external:
                raise InputError(f"{self.path}: /{asked}: expected values in this file, got a link to another file"
                                 + self.hint)
            file, target = map(os.fsdecode, proxy.get_val(name))
            prefixes = os.environ.get("HDF5_EXT_PREFIX", "").split(":")
            other = self.open_other(file, filter(None, prefixes))
            found = None
            if other is not None:
                self._others.append(other)
                found = other._follow(other.file["/"], target, asked, links + 1)
        else:
            raise InputError(f"{self.path}: /{asked}: expected an object, got a link of an unknown kind")
        if found is None:
            raise InputError(f"{self.path}: /{asked}: expected an object, got a link to nothing")
        return found


def _object(identifier):
    kind = h5i.get_type(identifier)
    made = {h5i.GROUP: h5py.Group, h5i.DATASET: h5py.Dataset, h5i.DATATYPE: h5py.Datatype}.get(kind)
    return identifier if made is None else made(identifier)


def _what(found):
    if isinstance(found, h5py.Group):
        return "a group"
    return "a dataset" if getattr(found, "shape", None) is not None else "no values"
