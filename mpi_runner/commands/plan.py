"""`plan`: memory, output size, bytes on the wire and time for a shape and ranks; computes and reads no values."""

import argparse
import json
import math

import numpy as np

from kda_engine.errors import InputError
from kda_engine.options import Options

from ..exit_codes import PASS
from ..messages import counted
from ..sizes import HELP, check_boundaries, check_sizes, whole_number

SIZES = {"tokens": 8192, "heads": 8, "value_heads": None, "K": 128, "V": 128, "sequences": 1}
TEXTS = {"tokens": "tokens of all sequences", "heads": "heads of q and k", "value_heads": "heads of v, g and beta",
         "K": "channels of a key", "V": "channels of a value", "sequences": "sequences that share the tokens"}
RATES = {"forward_rate": "tokens x value heads per second of a rank's forward; with it the plan has times (none)",
         "backward_rate": "the same for the backward (none)", "summary_rate": "the same for summaries (the forward's rate)",
         "bandwidth": "bytes per second that a rank sends (none)", "latency": "seconds per message, whatever its size (0)"}


def add(subparsers):
    parser = subparsers.add_parser(
        "plan", help="memory, traffic and time per rank and scan strategy", argument_default=argparse.SUPPRESS,
        description="Plans an input file, or a shape given by options (sequences of near equal length). Times come "
                    f"from closed formulas of the rates given here. `bench` measures such rates. {HELP}.")
    parser.add_argument("input", metavar="INPUT.h5", nargs="?", default=None)
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=whole_number, metavar="N",
                            help=f"{TEXTS[name]} ({default or 'as many as heads'})")
    parser.add_argument("--dtype", metavar="TYPE",
                        help="type of the inputs: bfloat16, float16, float32 or float64 (float32)")
    parser.add_argument("--ranks", type=whole_number, default=1, metavar="R", help="ranks of the run (1)")
    parser.add_argument("--ranks-per-node", type=whole_number, metavar="N", default=None,
                        help="how many ranks share a machine (all)")
    parser.add_argument("--backward", action="store_true", default=False, help="forward and backward (forward alone)")
    rates = parser.add_argument_group("rates to predict times from")
    for name, text in RATES.items():
        rates.add_argument("--" + name.replace("_", "-"), type=float, metavar="X", help=text)
    parser.add_argument("--per-rank", action="store_true", default=False,
                        help="a row for every rank (the smallest and the largest of the ranks, and all together)")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object (a text)")
    parser.set_defaults(run=main)


def main(args):
    """Print the plan. Raises InputError."""
    shape = _of_file(args) if args.input is not None else _of_options(args)
    if args.ranks < 1:
        raise InputError(f"ranks: expected at least 1, got {args.ranks}")
    check_sizes({"ranks": args.ranks})
    check_boundaries(shape.HV, shape.K, shape.V, args.ranks)
    if args.ranks_per_node is not None and args.ranks_per_node < 1:
        raise InputError(f"ranks_per_node: expected at least 1, got {args.ranks_per_node}")
    check_sizes({"ranks_per_node": args.ranks_per_node or 1})
    plan = make_plan(shape, args.ranks, args.backward, _rates(args), args.ranks_per_node)
    print(json.dumps(plan, indent=2) if args.json else _text(plan, args.per_rank))
    return PASS


class Shape:
    """T, H, HV, K, V, N; cu_seqlens NumPy int64 [N+1]; dtypes by input name; options: the operator's."""

    def __init__(self, H, HV, K, V, cu_seqlens, dtypes, options=Options()):
        self.H, self.HV, self.K, self.V, self.cu_seqlens, self.dtypes = H, HV, K, V, cu_seqlens, dtypes
        self.options = options
        self.T, self.N = int(cu_seqlens[-1]), len(cu_seqlens) - 1


def make_plan(shape, ranks, backward, rates=None, per_node=None):
    """The plan as plain values: shape, per rank {tokens, sequences, memory_bytes}, per scan {per rank, total}.

    per_node: ranks of one machine, None for all. rates: `prediction.Rates`; with them each scan has "seconds" too.
    """
    from kda_engine.partition import partition

    from .. import resources
    from ..parallel.rates import TYPICAL
    from ..parallel.routes import ROUTES
    from ..parallel.routes.choice import choose
    from ..prediction import predict
    from ..traffic import boundary_bytes, crossings, held_bytes, parameter_bytes, state_sizes

    segments = partition(shape.cu_seqlens, ranks)
    width = resources.state_bytes(shape, shape.dtypes)
    state, transition = state_sizes(shape.HV, shape.K, shape.V, f"f{width}")
    nodes = None if per_node is None else tuple(rank // per_node for rank in range(ranks))
    both, scans = crossings(segments, shape.HV, shape.K, shape.V, f"f{width}", backward, nodes), {}
    auto, held = choose(both[0], rates or TYPICAL), held_bytes("auto", both)
    for scan, route in ROUTES.items():
        if not all(map(route.covers, both)):
            continue
        sent = boundary_bytes(route, both)
        scans[scan] = {"bytes_sent": sent, "total": sum(sent), "largest": max(sent),
                       "memory_bytes": max(max(route.held(one)) for one in both)}
        if rates is not None:
            scans[scan]["seconds"] = predict(route, both, rates)
    return {
        "shape": {name: getattr(shape, name) for name in ("T", "H", "HV", "K", "V", "N")},
        "backward": backward,
        "input_bytes": resources.input_bytes(shape, shape.dtypes),
        "output_bytes": resources.output_bytes(shape, shape.dtypes, backward),
        "boundary_state_bytes": state, "boundary_transition_bytes": transition,
        "parameter_sum_bytes": parameter_bytes(shape.HV, shape.K, ranks) if backward else 0,
        "ranks": [{"tokens": segment.stop - segment.start, "sequences": len(segment.pieces),
                   "memory_bytes": resources.share_bytes(shape, shape.dtypes, segment.stop - segment.start,
                                                         len(segment.pieces), held[segment.rank], backward)}
                  for segment in segments],
        "scans": scans, "auto": {"scan": auto[0].name, "reason": auto[1]},
    }


def _rates(args):
    """The `prediction.Rates` that were stated, None without any. Raises InputError."""
    from ..prediction import Rates

    given = {name: getattr(args, name) for name in RATES if hasattr(args, name)}
    if not given:
        return None
    for name, value in given.items():
        if not math.isfinite(value) or not (value > 0 or value == 0 and name == "latency"):
            raise InputError(f"--{name.replace('_', '-')}: expected a number above 0 and finite, got {value}")
    needed = ("forward_rate", "bandwidth", *(("backward_rate",) if args.backward else ()))
    for name in needed:
        if name not in given:
            raise InputError(f"--{name.replace('_', '-')}: expected a rate beside the others, got none")
    return Rates(given["forward_rate"], given.get("backward_rate", given["forward_rate"]),
                 given.get("summary_rate", given["forward_rate"]), given["bandwidth"], given.get("latency", 0.0))


def _of_file(args):
    from kda_engine.hdf5.inputs import InputFile

    for name in (*SIZES, "dtype"):
        if hasattr(args, name):
            raise InputError(f"--{name.replace('_', '-')}: expected without INPUT.h5, which fixes it")
    with InputFile(args.input) as file:
        return Shape(file.H, file.HV, file.K, file.V, file.cu_seqlens, dict(file.dtypes), file.options)


def _of_options(args):
    from kda_engine.cases import float_type

    sizes = {name: getattr(args, name, default) for name, default in SIZES.items()}
    if sizes["value_heads"] is None:
        sizes["value_heads"] = sizes["heads"]
    for name, number in sizes.items():
        if number < (0 if name == "tokens" else 1):
            raise InputError(f"{name}: expected at least {0 if name == 'tokens' else 1}, got {number}")
    check_sizes(sizes)
    if sizes["value_heads"] % sizes["heads"]:
        raise InputError(f"value_heads: expected a multiple of {sizes['heads']} heads, got {sizes['value_heads']}")
    dtype, N = float_type(getattr(args, "dtype", "float32")), sizes["sequences"]
    bounds = np.array([sizes["tokens"] * n // N for n in range(N + 1)], np.int64)
    return Shape(sizes["heads"], sizes["value_heads"], sizes["K"], sizes["V"], bounds,
                 dict.fromkeys(("q", "k", "v", "g", "beta"), dtype))


def _text(plan, per_rank):
    shape = " ".join(f"{name} {number}" for name, number in plan["shape"].items())
    ranks, scans = plan["ranks"], plan["scans"]
    lines = [f"{'forward and backward' if plan['backward'] else 'forward'} of {shape} on {counted(len(ranks), 'rank')}",
             f"reads {_gib(plan['input_bytes'])} GiB, writes {_gib(plan['output_bytes'])} GiB; a boundary holds "
             f"S {_gib(plan['boundary_state_bytes'])} and M {_gib(plan['boundary_transition_bytes'])} GiB",
             f"{'rank':<8}{'tokens':>10}{'sequences':>11}{'memory':>12}" + "".join(f"{scan:>12}" for scan in scans)]
    columns = [[rank["tokens"] for rank in ranks], [rank["sequences"] for rank in ranks],
               [rank["memory_bytes"] for rank in ranks], *(scan["bytes_sent"] for scan in scans.values())]
    if per_rank:
        lines += [_row(number, row) for number, row in enumerate(zip(*columns))]
    else:
        lines += [_row("smallest", map(min, columns)), _row("largest", map(max, columns))]
    # Ranks may share a sequence: the sum of their counts would count it twice.
    totals = [plan["shape"]["T"], plan["shape"]["N"], *map(sum, columns[2:])]
    lines.append(_row("all", totals))
    held = "".join(f"{_gib(scan['memory_bytes']):>12}" for scan in scans.values())
    lines.append(f"{'held of other ranks, at most':<41}{held}")
    if all("seconds" in scan for scan in scans.values()):
        lines.append(f"{'predicted seconds':<41}" + "".join(f"{scan['seconds']:>12.4g}" for scan in scans.values()))
    lines.append(f"auto takes {plan['auto']['scan']}: {plan['auto']['reason']}")
    lines.append("memory in GiB, about, by the scan that auto takes; under each scan the GiB that a rank sends (exact decay skip)")
    if plan["parameter_sum_bytes"]:
        lines.append(f"and {_gib(plan['parameter_sum_bytes'])} GiB a rank for the sum of the parameter gradients")
    return "\n".join(lines)


def _row(name, values):
    """A line of the table; values: tokens, sequences, bytes of memory, bytes sent by each scan."""
    tokens, sequences, *sizes = values
    return f"{name:<8}{tokens:>10}{sequences:>11}" + "".join(f"{_gib(size):>12}" for size in sizes)


def _gib(count):
    """Bytes as GiB with four digits."""
    return f"{count / 2**30:.4g}"
