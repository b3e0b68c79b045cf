"""Micro-benchmarks of the fused chain's parts beside their predictions.

`python -m kda_engine.bench.probes [--json FILE]`, on a device of sm_90a. Results are held against the float64
recurrence first; only then is anything timed. Docs: docs/kernels/probes.md.
"""

import argparse
import json
import sys
from pathlib import Path

import cupy
import numpy as np

from ..arrays import to_host
from ..compare import compare, tolerance_for
from ..device.build import compiler_version
from ..device.device import current
from ..device.kernels.fused import CHAIN_SIZE
from ..device.launch import launch
from ..device.kernels.probes import PROBES, PROBE_THREADS, PROBE_WIDTHS, products_variant, roles_variant
from ..layout import CHUNK
from .predictions import verdict_table
from .probe_chunks import SLOTS, draw_chunks, expected, raw_slots
from .table import pipe_table

# Products of a round of each phase of `probe_products`, and the accumulators that they go to: one, or several.
PHASES = ((8, "one"), (40, "one"), (8, "several"), (40, "several"))

CHUNKS_OF_STEP = 4
# Cycles between two copies to the peer.
INTERVAL = 1400

# Chunks of the check: every slot several times over, and more than the state's range is looked at once in.
CHECKED_CHUNKS = 100


class Probes:
    """The probes on CuPy's current device. blocks: at once, each alone on a multiprocessor; an even number."""

    def __init__(self, blocks):
        self._device, self._blocks = current(), blocks
        self._case = draw_chunks()
        options = self._case.options
        self._numbers = {"count": self._blocks, "lower_bound": options.lower_bound,
                         "scale": options.scale_for(CHAIN_SIZE)}
        self._inputs = {"raw": cupy.asarray(raw_slots(self._case)),
                        "beta": cupy.asarray(self._case.beta.view("u2")),
                        "A_log": cupy.asarray(self._case.A_log), "dt_bias": cupy.asarray(self._case.dt_bias)}

    def products(self, width, warpgroups, rounds):
        """(cycles of a round by phase, sums [block, thread]) of `probe_products`."""
        threads = 128 * warpgroups
        cycles = cupy.zeros((self._blocks, len(PHASES), threads // 32), "i8")
        sums = cupy.zeros((self._blocks, threads), "f4")
        for _ in range(2):
            launch(PROBES["probe_products"], products_variant(width, warpgroups), self._device, count=self._blocks,
                   cycles=cycles, sums=sums, rounds=rounds)
        return _of_blocks(cycles) / rounds, to_host(sums)

    def roles(self, prepares, carries, chunks):
        """(cycles of a step, results by name) of `probe_roles`; results are those of every block."""
        return self._chain("probe_roles", chunks, roles_variant(prepares, carries), with_sums=True)

    def peer(self, chunks, turns, send):
        """(cycles of a step, results by name) of `probe_peer`, of the blocks that have a recurrence, every other one.

        Its result "interval" is that of the copies.
        """
        _, results = self._chain("probe_peer", chunks, roles_variant(False, True), with_sums=False, turns=turns,
                                 interval=INTERVAL, send=int(send))
        results = {name: x[::2] for name, x in results.items()}
        # The recurrence's warps are timed apart from the one that sends.
        sender = PROBE_THREADS // 64
        cycles = results["cycles"]
        results["interval"] = float(np.median(cycles[:, sender])) / max(turns, 1)
        return _step(cycles[:, :sender], chunks), results

    def _chain(self, name, chunks, variant, with_sums, **numbers):
        shape = (self._blocks,)
        results = {"out": cupy.zeros(shape + (CHUNK, CHAIN_SIZE), "u2"),
                   "final_state": cupy.zeros(shape + (CHAIN_SIZE, CHAIN_SIZE), "f4"),
                   "cycles": cupy.zeros(shape + (PROBE_THREADS // 32,), "i8")}
        if with_sums:
            results["sums"] = cupy.zeros(shape + (PROBE_THREADS // 64,), "u4")
        # The first launch finds code and data in no cache.
        for _ in range(2):
            launch(PROBES[name], variant, self._device, **self._inputs, **results, **self._numbers, **numbers, chunks=chunks)
        results = {name: to_host(x) for name, x in results.items()}
        results["out"] = results["out"].view(self._case.q.dtype)
        return _step(results["cycles"], chunks), results

    def check(self, chunks=CHECKED_CHUNKS):
        """The largest relative error against the float64 recurrence by probe; raises ValueError where blocks differ."""
        results = {"recurrence": (SLOTS - 1, self.roles(False, True, chunks)[1]),
                   "both": (SLOTS, self.roles(True, True, chunks)[1]),
                   "peer": (SLOTS - 1, self.peer(chunks, turns=chunks // 4, send=True)[1])}
        errors = {}
        for name, (ring, result) in results.items():
            out, state = expected(self._case, chunks, ring)
            errors[name] = max(compare(result["out"][0], out), compare(result["final_state"][0], state))
            _same_in_all_blocks(name, result["out"], result["final_state"])
        _same_in_all_blocks("preparation", self.roles(True, False, chunks)[1]["sums"])
        return errors

    def tolerance(self):
        """What `check` allows."""
        return tolerance_for(self._case.q.dtype)

    def measure(self, chunks, rounds):
        """{"figures": by the names of PREDICTIONS, "products": rows, "interval": cycles between two copies}."""
        products, figures = [], {}
        for width in PROBE_WIDTHS:
            for warpgroups in (1, 2):
                row = product_row(width, warpgroups, self.products(width, warpgroups, rounds)[0])
                products.append(row)
                if width == 32:
                    figures[f"product, {warpgroups} warpgroup{'s' * (warpgroups > 1)}"] = row["one"]
        figures["preparation"] = self.roles(True, False, chunks)[0]
        figures["recurrence"] = self.roles(False, True, chunks)[0]
        figures["both"] = self.roles(True, True, chunks)[0]
        turns = int(figures["recurrence"] * chunks / CHUNKS_OF_STEP / INTERVAL)
        alone, _ = self.peer(chunks, turns, send=False)
        sending, results = self.peer(chunks, turns, send=True)
        figures["peer"] = 100 * (sending / alone - 1)
        return {"figures": figures, "products": products, "interval": results["interval"]}


def product_row(width, warpgroups, cycles):
    """A width's figures from the cycles of a round by phase: cycles of a product, of any warpgroup, where they follow
    each other into one or several accumulators; of eight of one warpgroup into one, from start to end."""
    by_phase = dict(zip(PHASES, cycles))
    rates = {kind: (by_phase[40, kind] - by_phase[8, kind]) / (32 * warpgroups) for kind in ("one", "several")}
    return {"width": width, "warpgroups": warpgroups, **rates, "eight": by_phase[8, "one"]}


def products_table(rows):
    """Markdown of all widths. The tensor cores' rate is 2048 products of two numbers a cycle."""
    cells = [[str(row["width"]), str(row["warpgroups"]), f"{row['width'] / 2:g}", f"{row['one']:.1f}",
              f"{row['several']:.1f}", f"{row['eight']:.0f}"] for row in rows]
    return pipe_table(["columns", "warpgroups", "at the tensor cores' rate", "one accumulator", "several",
                       "eight of a warpgroup into one, with the wait"], cells)


def _of_blocks(cycles):
    """The slowest warp's cycles [..., warp], median over blocks [block, ...]."""
    return np.median(to_host(cycles).max(axis=-1), axis=0)


def _step(cycles, chunks):
    return float(_of_blocks(cycles)) * CHUNKS_OF_STEP / chunks


def _same_in_all_blocks(name, *results):
    for result in results:
        if any(block.tobytes() != result[0].tobytes() for block in result):
            raise ValueError(f"{name}: blocks with the same work have different results")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m kda_engine.bench.probes", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--chunks", type=int, default=4096, help="chunks of 16 tokens that a block works through")
    parser.add_argument("--rounds", type=int, default=512, help="rounds of 8 and of 40 products")
    given = parser.parse_args(arguments)
    multiprocessors = current().target.multiprocessors
    # What the L2 cache has to give does not matter to a few; all are measured too.
    few, every = Probes(multiprocessors // 8 * 2), Probes(multiprocessors // 2 * 2)
    errors = few.check()
    if not all(error <= few.tolerance() for error in errors.values()):
        print(f"failed their check, not timed: {errors}, allowed {few.tolerance():.0e}", file=sys.stderr)
        return 1
    measured, crowded = (probes.measure(given.chunks, given.rounds) for probes in (few, every))
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    origin = {"device": name, "driver": cupy.cuda.runtime.driverGetVersion(), "nvrtc": list(compiler_version()),
              "chunks": given.chunks, "rounds": given.rounds, "errors": errors}
    print(f"{name}, NVRTC {'.'.join(map(str, origin['nvrtc']))}, {given.chunks} chunks\n")
    print(verdict_table(measured["figures"], crowded["figures"]), end="\n\n")
    print(f"Copies to the peer came every {measured['interval']:,.0f} cycles, on all multiprocessors "
          f"{crowded['interval']:,.0f}.\n\nCycles a product:\n")
    print(products_table(measured["products"]))
    if given.json:
        given.json.write_text(json.dumps({**origin, "few": measured, "all": crowded}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
