"""Another process opens a file first, for HDF5 may crash or hang on a damaged one that holds virtual datasets.

Run as a program: `python -m kda_engine.hdf5.trial PATH READER EXTERNAL` opens PATH as "inputs" or "results", EXTERNAL 1
where links to other files are followed; it prints what is wrong with the file and ends with code 1, or 0.
"""

import os
import subprocess
import sys

from ..errors import InputError

# Opening takes milliseconds; starting Python on a busy file system takes seconds.
SECONDS = 60

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Trial:
    """One file's trial, made when it is first asked for.

    reader: "inputs" or "results". needed: False in the process that is the trial.
    """

    def __init__(self, path, reader, allow_external=False, needed=True):
        self.path, self.reader, self.allow_external, self.needed = os.fspath(path), reader, allow_external, needed

    def make(self):
        """Returns once another process has opened the file and ended in order. Raises InputError where it has not."""
        if not self.needed:
            return
        self.needed = False
        command = [sys.executable, "-m", __name__, self.path, self.reader, str(int(self.allow_external))]
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  env={**os.environ, "PYTHONPATH": path}, timeout=SECONDS, errors="surrogateescape",
                                  encoding="utf-8")
        except subprocess.TimeoutExpired:
            raise InputError(f"{self.path}: expected a file that HDF5 can open, got one on which it hangs "
                             f"({SECONDS} s)") from None
        if done.returncode == 1 and done.stdout:
            raise InputError(done.stdout)
        if done.returncode:
            raise InputError(f"{self.path}: expected a file that HDF5 can open, got one on which it crashes "
                             f"(code {done.returncode})")


def main(path, reader, allow_external):
    from .inputs import InputFile
    from .results import ResultFile

    trial = Trial(path, reader, bool(int(allow_external)), needed=False)
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        (InputFile if reader == "inputs" else ResultFile)(path, trial.allow_external, trial).close()
    except InputError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
