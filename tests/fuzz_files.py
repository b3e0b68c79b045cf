"""Run as a program by test_fuzz_files: damages one file again and again and reads it, in a process that may die of it.

Arguments: the reader's name, the file to damage, the file to open (another one for a shard), the seed, how many tries.
Prints before every try its number and after it the outcome: "same", "refused", or what went wrong. A try has SECONDS;
then the process dies.
"""

import hashlib
import os
import random
import signal
import sys

from kda_engine import InputError
from kda_engine.captured import read_captured
from kda_engine.hdf5 import inputs
from kda_engine.hdf5.golden import GoldenError, read_golden
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.results import ResultFile

SECONDS = 60


def digest(*parts):
    """Of arrays and of whatever else has a repr."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(repr(part).encode() if not hasattr(part, "tobytes") else
                   f"{part.dtype} {part.shape}".encode() + part.tobytes())
    return sha.hexdigest()


def of_input(path):
    with InputFile(path) as file:
        return digest(file.options, file.cu_seqlens, *(file.read_whole(name) for name in file.dtypes))


def of_direct(path):
    """Of an input whose rows are read beside the HDF5 library, as those of large ones are."""
    inputs._LARGE = 0
    return of_input(path)


def of_result(path):
    with ResultFile(path) as file:
        return digest(file.tensors(), file.report, file.provenance, *map(file.read, file.tensors()))


def of_golden(path):
    golden = read_golden(path)
    return digest(golden.tolerances, golden.case.options, golden.case.q, golden.case.g, *golden.results.values())


def of_capture(path):
    arguments = read_captured(path)
    return digest(*(value for name, value in sorted(arguments.items()) if name != "conv"))


READERS = {"input": of_input, "direct": of_direct, "result": of_result, "golden": of_golden, "capture": of_capture}


def damaged(good, chance):
    """`good` with a bit, some bytes, a block or its end spoilt."""
    content = bytearray(good)
    at = chance.randrange(len(good))
    kind = chance.choice(("bit", "bit", "bit", "bytes", "block", "end"))
    if kind == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif kind == "bytes":
        for place in chance.choices(range(len(good)), k=8):
            content[place] = chance.randrange(256)
    elif kind == "block":
        length = chance.choice((4, 16, 512))
        content[at : at + length] = bytes(len(content[at : at + length])) if chance.random() < 0.5 else \
            chance.randbytes(len(content[at : at + length]))
    else:
        content[at:] = b""
    return bytes(content)


def main(reader, target, opened, seed, tries):
    read, chance = READERS[reader], random.Random(int(seed))
    healthy = read(opened)
    with open(target, "rb") as file:
        good = file.read()
    for number in range(int(tries)):
        content = damaged(good, chance)
        with open(target, "wb") as file:
            file.write(content)
        print(number, end=" ", flush=True)
        signal.alarm(SECONDS)
        try:
            # Zeros over zeros damage nothing.
            outcome = "same" if read(opened) == healthy else "another result"
        except (InputError, GoldenError):
            outcome = "refused"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        signal.alarm(0)
        print(outcome, flush=True)
    with open(target, "wb") as file:
        file.write(good)


if __name__ == "__main__":
    sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    main(*sys.argv[1:])
