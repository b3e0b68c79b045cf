"""The forward's speed and accuracy on this device: `python -m kda_engine.bench.forward [--shapes A F] [--output DIR]`.

Writes forward.json and forward.md. A shape whose result fails its check is not timed.
"""

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import cupy

import kda_engine as kda

from . import peers, roofline, timing
from .accuracy import measure_accuracy
from .shapes import REGIMES, SHAPES, draw

# Against the same engine on the same values in float32, which the tests hold against the oracle.
TOLERANCE = 3.5e-3


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--peers", nargs="*", default=list(peers.available()), choices=peers.PEERS)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--tolerance", type=float, default=0.0, help="of the certified skip in the strong regime")
    parser.add_argument("--accuracy", nargs="*", type=int, default=[8192], help="tokens to measure accuracy at")
    parser.add_argument("--output", type=Path, default=Path("."))
    arguments = parser.parse_args(argv)
    bandwidth = timing.copy_bandwidth()
    report = {"device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "cupy": cupy.__version__,
              "driver": cupy.cuda.runtime.driverGetVersion(), "command": " ".join(sys.argv),
              "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "copy_bytes_per_second": bandwidth,
              "speed": [], "accuracy": []}
    for name in arguments.shapes:
        for regime in REGIMES:
            report["speed"].append(_speed(name, regime, bandwidth, arguments))
            cupy.get_default_memory_pool().free_all_blocks()
    for tokens in arguments.accuracy:
        for regime in ("strong", "weak", "repeat"):
            report["accuracy"].append({"regime": regime, "tokens": tokens, **measure_accuracy(regime, tokens, heads=16)})
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "forward.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (arguments.output / "forward.md").write_text(text)
    print(text)


def _speed(name, regime, bandwidth, arguments):
    shape = SHAPES[name]
    inputs = draw(shape, regime)
    options = kda.Options(tolerance=arguments.tolerance if regime == "strong" else 0.0)
    call = lambda: kda.forward(**inputs, cu_seqlens=shape.cu_seqlens, options=options, engine="cuda", save=False)
    row = {"shape": name, "regime": regime, "error": _error(call(), inputs, shape, options)}
    if not row["error"] <= TOLERANCE:
        return row
    calls = {"ours": call}
    row["peer_errors"] = {}
    for peer in arguments.peers:
        theirs = peers.available()[peer](inputs, shape.cu_seqlens, options)
        # How far the peer is from us; a peer that computes something else must not pass for a fast one.
        row["peer_errors"][peer] = kda.compare(theirs()[0].reshape(inputs["v"].shape), call().out)
        calls[peer] = theirs
    row["milliseconds"] = {side: vars(taken) for side, taken in timing.measure(calls, arguments.samples).items()}
    row["floor"] = roofline.forward_bytes(inputs) / bandwidth * 1e3
    row["host_microseconds"] = timing.host_seconds(call, samples=20) * 1e6
    return row


def _error(result, inputs, shape, options):
    """The larger error of out and final state on the first and the last head."""
    pick = lambda x: cupy.ascontiguousarray(x[..., [0, -1], :]).astype("f4")
    few = {key: pick(inputs[key]) for key in ("q", "k", "v", "g")}
    few["beta"] = inputs["beta"][:, [0, -1]].astype("f4")
    few |= {key: inputs[key][[0, -1]] for key in ("A_log", "dt_bias")}
    few["initial_state"] = inputs["initial_state"][:, [0, -1]]
    expected = kda.forward(**few, cu_seqlens=shape.cu_seqlens, options=options, engine="cuda", save=False)
    return max(kda.compare(pick(result.out), expected.out),
               kda.compare(result.final_state[:, [0, -1]], expected.final_state))


def markdown(report):
    """The report as Markdown tables."""
    sides = sorted({side for row in report["speed"] for side in row.get("milliseconds", ())} - {"ours"})
    lines = [f"# Forward on {report['device']}", "",
             f"{report['date']}, CuPy {report['cupy']}, driver {report['driver']}, copy "
             f"{report['copy_bytes_per_second'] / 1e12:.2f} TB/s, `{report['command']}`", "",
             "Milliseconds, median (distance between quartiles); floor: each byte moved once at the copy's rate.", "",
             "| shape | regime | error | ours | floor | of floor | host us |"
             + "".join(f" {x} | {x} / ours | {x} from ours |" for x in sides),
             "| --- | --- | --- | --- | --- | --- | --- |" + " --- | --- | --- |" * len(sides)]
    for row in report["speed"]:
        if "milliseconds" not in row:
            lines.append(f"| {row['shape']} | {row['regime']} | {row['error']:.1e}: failed its check | | | | |")
            continue
        times = row["milliseconds"]
        ours = times["ours"]["median"]
        lines.append(f"| {row['shape']} | {row['regime']} | {row['error']:.1e} | {ours:.3f} ({times['ours']['spread']:.3f}) | {row['floor']:.3f} | "
                     f"{100 * row['floor'] / ours:.0f} % | {row['host_microseconds']:.0f} |"
                     + "".join(f" {times[x]['median']:.3f} | {times[x]['median'] / ours:.2f} | "
                               f"{row['peer_errors'][x]:.1e} |" for x in sides))
    lines += ["", "Relative error against the float64 recurrence, bfloat16 inputs, 16 heads.", "",
              "| regime | tokens | out | final state | worst 64 rows of a head |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {row['regime']} | {row['tokens']} | {row['out']:.2e} | {row['final_state']:.2e} | {row['worst_block']:.2e} |"
              for row in report["accuracy"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
