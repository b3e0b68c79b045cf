"""The list of a folder's goldens: MANIFEST.toml names the files, their checksums and how they were made."""

import os
import tomllib
from dataclasses import asdict, dataclass

from ..errors import InputError
from .golden import GoldenError
from .opening import digest

NAME = "MANIFEST.toml"
_HEAD = "# Goldens of this folder; `kda-engine golden new` keeps this list, `kda-engine golden check` reads it.\n"


@dataclass(frozen=True)
class Entry:
    """One golden: file name in the folder, SHA-256 of the file, the case it holds, the command that made it."""

    file: str
    sha256: str
    case: str
    made: str


def read_manifest(folder):
    """Entries by file name; empty when the folder has no manifest. Raises GoldenError when it cannot be read."""
    path = os.path.join(folder, NAME)
    try:
        with open(path, "rb") as file:
            listed = tomllib.load(file).get("golden", [])
        return {entry["file"]: Entry(**entry) for entry in listed}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GoldenError(f"{path}: expected a list of goldens, got: {error}") from None


def record(path, case, made):
    """Enter the golden at `path` into its folder's manifest, if the folder keeps one."""
    folder, name = os.path.split(os.path.abspath(path))
    manifest = os.path.join(folder, NAME)
    if not os.path.exists(manifest):
        return
    entries = read_manifest(folder) | {name: Entry(name, digest(path), case, made)}
    temporary = f"{manifest}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(_HEAD)
        for _, entry in sorted(entries.items()):
            # The values are file names, hexadecimal and commands: nothing that TOML's basic strings would escape.
            file.write("\n[[golden]]\n" + "".join(f'{key} = "{value}"\n' for key, value in asdict(entry).items()))
    os.replace(temporary, manifest)


def check_listed(path):
    """Raise GoldenError unless the golden at `path` is the one its folder's manifest lists, if that lists one."""
    folder, name = os.path.split(os.path.abspath(path))
    entry = read_manifest(folder).get(name)
    try:
        if entry is not None and digest(path) != entry.sha256:
            raise GoldenError(f"{path}: expected the file that {NAME} lists (SHA-256 {entry.sha256[:12]}...), "
                              "got another")
    except InputError as error:
        raise GoldenError(str(error)) from None
