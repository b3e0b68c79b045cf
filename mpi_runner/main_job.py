"""The main job: one input file, forward and backward over all ranks, one output file."""

import numpy as np

from kda_engine import layout
from kda_engine.arrays import array_module, to_host
from kda_engine.engines import cuda_usable, make_engine
from kda_engine.errors import InputError
from kda_engine.finite import check_states, check_values
from kda_engine.hdf5.inputs import InputFile
from kda_engine.layout import Operands
from kda_engine.partition import partition
from kda_engine.refusal import refusal

from . import resources
from .clock import Clock
from .convolution import CHANNELS, ShareConvolution
from .gathering import Part, check_output, write_gathered, write_shards
from .progress import Progress
from .report import Digest, describe
from .share import Share
from .staged import StagedEngine
from .step import Step

PER_TOKEN = ("q", "k", "v", "g", "beta")


def run_job(session, job, cuts=None):
    """Do `job` on this rank of `session`. Collective. Returns the report on rank 0 (None elsewhere or for a dry run).

    cuts: as in `partition`, None for near equal shares. Raises AgreedError for input that cannot be used (nothing is
    written then), whatever else goes wrong on the rank where it does.
    """
    progress = Progress(session.rank)
    clock = Clock(progress.phase, lambda: session.exchange.sent)
    session.on_poll = progress.tick
    session.exchange.timeout = job.exchange_timeout
    source = session.together(lambda: InputFile(job.input, job.allow_external))
    with source:
        run = _Run(session, job, source, clock, cuts)
        report = run.print_plan() if job.dry_run else run.execute()
    progress.done()
    return report


class _Run:
    """The steps of one job on one rank."""

    def __init__(self, session, job, source, clock, cuts):
        self.session, self.job, self.source, self.clock = session, job, source, clock
        self.options = session.together(lambda: job.options(source.options, source.K))
        session.together(self._check_job)
        self.segments = partition(source.cu_seqlens, session.size, cuts)
        self.segment = self.segments[session.rank]
        self.threads = session.threads()
        self.state_dtype = np.dtype("f8" if resources.state_bytes(source.dtypes) == 8 else "f4")
        self.engine = session.together(self._make_engine)
        session.together(self._check_engine)
        self._check_resources()

    def _make_engine(self):
        if self.job.engine in ("auto", "cuda") and cuda_usable():
            self.session.use_device(self.job.oversubscribe)
        return make_engine(self.job.engine, self.session.poll, self.threads)

    def _check_engine(self):
        """Whether the engine takes this input is told before anything is read."""
        source = self.source
        shapes = {"q": (source.H, source.K), "k": (source.H, source.K), "v": (source.HV, source.V),
                  "g": (source.HV, source.K), "beta": (source.HV,)}
        empty = {name: np.empty((0,) + shape, source.dtypes[name]) for name, shape in shapes.items()}
        problem = refusal(self.engine, Operands(**empty, A_log=None, dt_bias=None, cu_seqlens=np.array([0, 0]),
                                                state_dtype=self.state_dtype), self.options)
        if problem is not None:
            raise InputError(f"{self.job.input}: {problem}")

    def _check_job(self):
        if self.job.backward and not self.source.has("d_out"):
            raise InputError(f"{self.job.input}: /inputs/d_out: expected a dataset for --backward, got nothing")
        if self.session.rank == 0:
            # A name that cannot be written is told now, not after the work.
            check_output(self.job.output, self.job.force, self.job.io)

    def _check_resources(self):
        source, job = self.source, self.job
        segment = self.segment
        self.memory = resources.share_bytes(source, source.dtypes, segment.stop - segment.start, len(segment.pieces),
                                            self.session.size, job.backward)
        self.disk = resources.output_bytes(source, source.dtypes, job.backward)
        if self.session.rank == 0:
            resources.check_disk(job.output, self.disk)
        on_node = sum(self.session.node.allgather(self.memory))
        if self.session.node.rank == 0:
            resources.check_memory(on_node)

    def print_plan(self):
        """What would be done, on rank 0's standard output."""
        rows = self.session.exchange.collect((self.segment, self.memory), "collecting the plan")
        if self.session.rank:
            return
        print(f"engine {self.engine.name}, scan {self.job.route}, output {self.disk} bytes, options {self.options}")
        for segment, memory in rows:
            pieces = ", ".join(f"{p.sequence}[{p.start}:{p.stop}]" for p in segment.pieces)
            print(f"rank {segment.rank}: tokens {segment.start}:{segment.stop}, about {memory} bytes of memory, "
                  f"sequences {pieces or 'none'}")

    def execute(self):
        digest = Digest(self.job.input) if self.session.rank == 0 else None
        with self.clock("read"):
            self.session.together(self._read)
        if self.job.check_finite:
            self.session.together(self._check_finite)
        with self.clock("prepare"):
            self._take_to_engine()
        step = Step(StagedEngine(self.engine), self.session.exchange, self.clock, self.segments, self.options,
                    self.job.route, self.job.backward)
        result = step.forward(self.share, self.initial_states)
        parameters = {}
        if self.job.backward:
            d_outs = {name: self.d_out[group.start : group.stop] for name, group in self.share.named_groups}
            step.backward(d_outs, self.d_final_states)
            parameters = self._reduce(result)
        skips = []
        if self.session.size > 1:
            # Before anybody opens the output: a failure must not leave a part of it.
            with self.clock("bounds"):
                skips = self.session.exchange.collect([skip() for skip in result.skips], "collecting the bounds")
        parts = self._parts(result, parameters)
        write = write_shards if self.job.io == "shards" else write_gathered
        with self.clock("write"):
            report = write(self.session, self.job.output, self.job.force, parts,
                           lambda: describe(self, skips, digest, parts))
        return report

    def _take_to_engine(self):
        """Everything per token to where the engine works."""
        self.share = Share.of(self.segment, self.engine.take(self.share.operands))
        if self.job.backward:
            self.d_out = self.engine.take_array(self.d_out)

    def _read(self):
        source, segment = self.source, self.segment
        rows = {name: source.read(name, segment.start, segment.stop) for name in PER_TOKEN
                if source.conv is None or name not in CHANNELS}
        self.convolution = None
        if source.conv is not None:
            self.convolution = ShareConvolution.read(source, self.segments, self.session.rank,
                                                     self.engine.take_array)
            rows |= {name: self.convolution.forward(name) for name in CHANNELS}
        parameter = lambda name: source.read_whole(name) if source.has(name) and self.options.gate != "log" else None
        operands = Operands(**rows, A_log=parameter("A_log"), dt_bias=parameter("dt_bias"),
                            cu_seqlens=np.array([0, segment.stop - segment.start]), state_dtype=self.state_dtype)
        self.share = Share.of(segment, operands)
        self.initial_states = self._read_states("initial_state", segment.started, from_end=True)
        if self.job.backward:
            self.d_out = source.read("d_out", segment.start, segment.stop)
            self.d_final_states = self._read_states("d_final_state", segment.ended, from_end=False)

    def _read_states(self, name, sequences, from_end):
        """[pieces,HV,K,V] with the file's states of `sequences` at the end (or start), zeros elsewhere."""
        operands = self.share.operands
        states = np.zeros(operands.state_shape, operands.state_dtype)
        if self.source.has(name) and len(sequences):
            stored = self.source.read_states(name, sequences.start, sequences.stop)
            here = layout.state_out(stored, self.options.state_layout)
            place = slice(len(states) - len(here), None) if from_end else slice(0, len(here))
            states[place] = here
        return states

    def _check_finite(self):
        segment, where = self.segment, f"{self.job.input}: rank {self.session.rank}: /inputs/"
        first = segment.pieces[0].sequence if segment.pieces else 0
        gradient = {"d_out": self.d_out} if self.job.backward else {}
        check_values(self.share.operands, self.options, where, segment.start, first, **gradient)
        begin = len(segment.pieces) - len(segment.started)
        check_states(where, segment.started.start, initial_state=self.initial_states[begin:])
        if self.job.backward:
            check_states(where, segment.ended.start, d_final_state=self.d_final_states[: len(segment.ended)])

    def _reduce(self, result):
        """Gradients of everything all tokens share, summed over all ranks; typed for the output."""
        source, dtype = self.source, self.state_dtype
        HV, K = source.HV, source.K
        mine = {}
        of_groups = lambda name, shape: sum((getattr(g, name) for g in result.gradients.values()), np.zeros(shape))
        if self.share.operands.A_log is not None:
            mine["dA_log"] = of_groups("dA_log", (HV,))
        if self.share.operands.dt_bias is not None:
            mine["ddt_bias"] = of_groups("ddt_bias", (HV, K))
        self.raw_gradients = {}
        if self.convolution is not None:
            for name in CHANNELS:
                rows = self._rows(result, "d" + name, source.dtypes[name])
                with self.clock("backward"):
                    dx, dweight, dbias = self.convolution.backward(name, rows, self.session.exchange)
                self.raw_gradients["d" + name] = dx
                mine[f"conv/d{name}_weight"] = to_host(dweight)
                if dbias is not None:
                    mine[f"conv/d{name}_bias"] = to_host(dbias)
        with self.clock("reduce"):
            flat = np.concatenate([np.zeros(0)] + [x.ravel().astype("f8") for x in mine.values()])
            total = self.session.exchange.sum(flat, "summing the parameter gradients")
        starts = np.cumsum([0] + [x.size for x in mine.values()])
        return {name: total[a : a + x.size].reshape(x.shape).astype(dtype)
                for (name, x), a in zip(mine.items(), starts)}

    def _rows(self, result, name, dtype):
        """One per-token gradient of the whole share, the groups' one after the other."""
        parts = [getattr(result.gradients[group], name) for group, _ in self.share.named_groups]
        if not parts:
            return self.engine.take_array(np.empty(getattr(self.share.operands, name[1:]).shape, dtype))
        return array_module(parts[0]).concatenate(parts)

    def _parts(self, result, parameters):
        """Every tensor of the output as this rank holds it, in the file's order."""
        source, segments, state_dtype = self.source, self.segments, self.state_dtype
        N, HV, K, V = source.N, source.HV, source.K, source.V
        tokens = [(s.start, s.stop - s.start) for s in segments]
        sequences = lambda of: [(r.start if len(r) else 0, len(r)) for r in (getattr(s, of) for s in segments)]
        state = lambda x: layout.state_out(x, self.options.state_layout)
        state_shape = (N, HV, K, V) if self.options.state_layout == "KV" else (N, HV, V, K)
        groups = [group for group, _ in self.share.named_groups]
        blocks = lambda kind, name: [getattr(getattr(result, kind)[group], name) for group in groups]
        shape = lambda name: (source.T,) + getattr(self.share.operands, name).shape[1:]
        ended, started = len(self.segment.ended), len(self.segment.started)
        parts = [
            Part("outputs/out", shape("v"), source.dtypes["v"], tokens, blocks("forwards", "out")),
            Part("outputs/final_state", state_shape, state_dtype, sequences("ended"),
                 [state(result.final_state[:ended])]),
        ]
        if self.job.backward:
            for name in PER_TOKEN:
                raw = self.raw_gradients.get("d" + name)
                rows = blocks("gradients", "d" + name) if raw is None else [raw]
                parts.append(Part(f"grads/d{name}", shape(name), source.dtypes[name], tokens, rows))
            for name, x in parameters.items():
                on_root = [(0, len(x))] + [(0, 0)] * (self.session.size - 1)
                parts.append(Part(f"grads/{name}", x.shape, state_dtype, on_root,
                                  [x] if self.session.rank == 0 else []))
            begin = len(result.d_initial_state) - started
            parts.append(Part("grads/d_initial_state", state_shape, state_dtype, sequences("started"),
                              [state(result.d_initial_state[begin:])]))
        if self.job.save_boundary:
            parts += self._boundary_parts(result)
        return parts

    def _boundary_parts(self, result):
        """One row a rank: its own pair and what it scanned; NaN where it has none (a rank that feeds nobody, say)."""
        source, size, dtype = self.source, self.session.size, self.state_dtype
        each = [(rank, 1) for rank in range(size)]
        parts = []
        for name in ("M", "S", "S_in") + (("D", "dS_out") if self.job.backward else ()):
            shape = (source.HV, source.K, source.K if name == "M" else source.V)
            mine = result.boundary.get(name, np.full(shape, np.nan, dtype))
            parts.append(Part(f"boundary/{name}", (size,) + shape, dtype, each, [mine[None]]))
        return parts

