"""`input`: makes an input file, from a named case, captured tensors or a text."""

import argparse
import os

from kda_engine.errors import InputError
from kda_engine.regular_file import check_regular

from .. import operator_options
from ..exit_codes import PASS
from ..job import OPERATOR_OPTIONS
from ..sizes import HELP, check_allocation, check_sizes, whole_number

SIZES = ("tokens", "heads", "value_heads", "K", "V", "sequences")
TEXTS = {"tokens": "tokens of all sequences; of a text at most so many (the case's own, or the whole text)",
         "heads": "heads of q and k (the case's own; of a text 4)",
         "value_heads": "heads of v, g and beta, a multiple of the heads (as the case has them; of a text as many as heads)",
         "K": "channels of a key (the case's own; of a text 64)",
         "V": "channels of a value (the case's own; of a text 64)",
         "sequences": "sequences that share the tokens (the case's own)"}
# About, while a case is drawn: float32 draws and their casts, float64 random numbers.
BYTES_OF_A_VALUE = 12
# What each source of values takes beside the output's name.
TAKES = {"case": (*SIZES, "dtype", "seed"), "from": OPERATOR_OPTIONS,
         "from_text": ("tokens", "heads", "value_heads", "K", "V", "dtype", "seed")}


def add(subparsers):
    parser = subparsers.add_parser(
        "input", help="make an input file from a case, captured tensors or a text", argument_default=argparse.SUPPRESS,
        description="Writes OUT.h5, with the data that --backward needs. kda_engine.cases has the names for --case; "
                    f"the message about a wrong name lists them. {HELP}.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--case", metavar="NAME", help="a named, seeded case (or --from or --from-text)")
    source.add_argument("--from", metavar="FILE", help="tensors in .npz or .safetensors, named as in input files (or --case or --from-text)")
    source.add_argument("--from-text", metavar="FILE", help="a text; a layer with seeded weights projects its bytes (or --case or --from)")
    sizes = parser.add_argument_group("sizes of a case or a text")
    for name in SIZES:
        sizes.add_argument("--" + name.replace("_", "-"), type=whole_number, metavar="N", help=TEXTS[name])
    sizes.add_argument("--dtype", metavar="TYPE", help="bfloat16, float16, float32 or float64 (float32)")
    sizes.add_argument("--seed", type=whole_number, metavar="N", help="of all random numbers, 0 or above (0)")
    operator = parser.add_argument_group("operator options of captured tensors", "these override the capture's own; "
                                         "an option that neither names has the default in brackets")
    operator_options.add(operator)
    parser.add_argument("--force", action="store_true", default=False, help="replace an existing file (refuse)")
    parser.add_argument("output", metavar="OUT.h5", help="the input file that is made")
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

    if name in cases.RECIPES:
        of_case = cases.RECIPES[name].sizes
        sizes = {key: getattr(of_case, key) for key in SIZES if key != "sequences"}
        sizes["sequences"] = len(of_case.lengths or (0,))
        if "heads" in chosen:
            sizes["value_heads"] = chosen["heads"] * (of_case.value_heads // of_case.heads)
        sizes |= {key: chosen[key] for key in SIZES if key in chosen}
        check_sizes(sizes)
        states = 2 * sizes["sequences"] * sizes["value_heads"] * sizes["K"] * sizes["V"]
        check_allocation("sizes", BYTES_OF_A_VALUE * (sizes["tokens"] * _token_values(sizes) + states))
    return _arguments(cases.make(name, **chosen))


def _token_values(sizes):
    """Values of one token of q, k, v, g, beta and d_out."""
    H, HV, K, V = (sizes[name] for name in ("heads", "value_heads", "K", "V"))
    return 2 * H * K + HV * (2 * V + K + 1)


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
    tokens = os.path.getsize(path) if limit is None else min(limit, os.path.getsize(path))
    heads = chosen.get("heads", 4)
    sizes = {"tokens": tokens, "heads": heads, "value_heads": heads, "K": 64, "V": 64, **chosen}
    sizes = {name: sizes[name] for name in SIZES if name in sizes}
    check_sizes(sizes)
    H, HV, K, V = (sizes[name] for name in ("heads", "value_heads", "K", "V"))
    weights = H * K * max(H * K, HV * V, HV) + K * HV * K
    check_allocation("sizes", BYTES_OF_A_VALUE * ((tokens + 256) * _token_values(sizes) + weights))
    try:
        with open(path, "rb") as file:
            text = file.read(tokens)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return _arguments(project(text, **chosen))


def _arguments(case):
    """A case as arguments of `write_input`."""
    return {name: value for name, value in vars(case).items() if name not in ("name", "repeated_keys")}
