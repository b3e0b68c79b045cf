"""`input`: makes an input file, from a named case, captured tensors or a text."""

import argparse
import os

from kda_engine.errors import InputError
from kda_engine.regular_file import check_regular

from ..exit_codes import PASS

SIZES = ("tokens", "heads", "value_heads", "K", "V", "sequences")
OPERATOR_OPTIONS = ("gate", "lower_bound", "beta", "qk_l2norm", "scale", "state_layout")
# What each source of values takes beside the output's name.
TAKES = {"case": (*SIZES, "dtype", "seed"), "from": OPERATOR_OPTIONS,
         "from_text": ("tokens", "heads", "value_heads", "K", "V", "dtype", "seed")}


def add(subparsers):
    parser = subparsers.add_parser(
        "input", help="make an input file from a case, captured tensors or a text", argument_default=argparse.SUPPRESS,
        description="Writes OUT.h5, with what --backward needs. --case names: see kda_engine.cases; "
                    "a wrong name lists them.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--case", metavar="NAME", help="a named, seeded case")
    source.add_argument("--from", metavar="FILE", help="tensors in .npz or .safetensors, named as in input files")
    source.add_argument("--from-text", metavar="FILE", help="a layer's seeded projections of the file's bytes")
    sizes = parser.add_argument_group("sizes of a case or a text")
    for name in SIZES:
        text = "tokens in all (of a text: at most so many)" if name == "tokens" else None
        sizes.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=text)
    sizes.add_argument("--dtype", help="bfloat16, float16, float32 (the default) or float64")
    sizes.add_argument("--seed", type=int)
    operator = parser.add_argument_group("operator options of captured tensors; they override the capture's own")
    operator.add_argument("--gate")
    operator.add_argument("--lower-bound", type=float)
    operator.add_argument("--beta")
    operator.add_argument("--qk-l2norm", type=int, metavar="0|1")
    operator.add_argument("--scale", type=float)
    operator.add_argument("--state-layout")
    parser.add_argument("--force", action="store_true", default=False, help="replace an existing file")
    parser.add_argument("output", metavar="OUT.h5")
    parser.set_defaults(run=main)


def main(args):
    """Write the file and say what is in it. Raises InputError."""
    from kda_engine.hdf5.inputs import InputFile, write_input

    given = vars(args)
    source = next(name for name in TAKES if name in given)
    chosen = {name: given[name] for name in (*SIZES, "dtype", "seed", *OPERATOR_OPTIONS) if name in given}
    for name in chosen:
        if name not in TAKES[source]:
            flag, of = name.replace("_", "-"), source.replace("_", "-")
            raise InputError(f"--{flag}: expected without --{of}, which fixes it")
    made_from = given[source]
    if source != "case" and os.path.abspath(made_from) == os.path.abspath(args.output):
        raise InputError(f"output: expected another file than {made_from}")
    arguments = {"case": _case, "from": _captured, "from_text": _text}[source](made_from, chosen)
    write_input(args.output, **arguments, force=args.force)
    with InputFile(args.output) as file:
        print(f"wrote {args.output}: {file.T} tokens, {file.N} sequences, H {file.H}, HV {file.HV}, K {file.K}, "
              f"V {file.V}, gate {file.options.gate}, beta {file.options.beta}, "
              f"{'with' if file.has('d_out') else 'without'} d_out, {'with' if file.has('conv') else 'without'} conv")
    return PASS


def _case(name, chosen):
    from kda_engine import cases

    return _arguments(cases.make(name, **chosen))


def _captured(path, chosen):
    from kda_engine.captured import read_captured
    from kda_engine.hdf5.inputs import check_arguments

    from ..resources import memory_available

    def check(**arguments):
        check_arguments(path, **arguments)
        needed, available = sum(getattr(x, "nbytes", 0) for x in arguments.values()), memory_available()
        if available is not None and available < needed:
            raise InputError(f"{path}: expected tensors that fit in memory, {available} bytes, got {needed} bytes")

    return read_captured(path, chosen, check)


def _text(path, chosen):
    from kda_engine.layer import project

    limit = chosen.pop("tokens", None)
    if limit is not None and limit < 0:
        raise InputError(f"tokens: expected at least 0, got {limit}")
    check_regular(path, "a file of text")
    try:
        with open(path, "rb") as file:
            text = file.read() if limit is None else file.read(limit)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return _arguments(project(text, **chosen))


def _arguments(case):
    """A case as arguments of `write_input`."""
    return {name: value for name, value in vars(case).items() if name not in ("name", "repeated_keys")}
