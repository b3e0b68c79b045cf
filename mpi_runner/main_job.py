"""The main job: one input file, forward and backward over all ranks, one output file."""

import json
from dataclasses import replace

import numpy as np

from kda_engine import layout
from kda_engine.engines import cuda_usable, make_engine
from kda_engine.errors import InputError
from kda_engine.finite import check_states, check_values
from kda_engine.hdf5.inputs import InputFile
from kda_engine.layout import CHUNK, Operands
from kda_engine.partition import partition

from . import resources
from .clock import Clock
from .gathering import WRITERS, check_output
from .head_shards import HeadsOfInput, heads_of_ranks
from .mpi import MPI
from .output_parts import output_parts, output_parts_of_heads
from .parallel.control import Control
from .parallel.convolution import CHANNELS, ShareConvolution, halo_tokens
from .parallel.folding import SHORTEST, piece_length
from .parallel.problem import RankProblem, UnsuitableScan
from .parallel.transports import TRANSPORTS
from .progress import Progress
from .report import Digest, describe
from .session import AgreedError
from .traffic import crossings, held_bytes

PER_TOKEN = ("q", "k", "v", "g", "beta")


def run_job(session, job, cuts=None):
    """Do `job` on this rank of `session`. Collective. Returns the report on rank 0 (None elsewhere or for a dry run).

    cuts: as in `partition`, None for near equal shares. Raises AgreedError for input that cannot be used (nothing is
    written then), whatever else goes wrong on the rank where it does.
    """
    progress = Progress(session.rank)
    session.on_poll = progress.tick
    session.control.timeout = job.exchange_timeout
    threads = session.threads()
    source = session.together(lambda: InputFile(job.input, job.allow_external, threads=threads, poll=session.poll))
    with source:
        run = _Run(session, job, source, progress, cuts)
        report = run.print_plan() if job.dry_run else run.execute()
    progress.done()
    return report


class _Run:
    """The steps of one job on one rank."""

    def __init__(self, session, job, source, progress, cuts):
        # source: what this rank sees of the file.
        self.session, self.job, self.file, self.source, self.heads = session, job, source, source, None
        control = session.control
        if job.shard == "heads":
            # A rank's heads are a problem of their own, which it computes alone.
            self.heads = session.together(lambda: heads_of_ranks(source.H, session.size))
            self.source = HeadsOfInput(source, self.heads[session.rank])
            control = Control(MPI.COMM_SELF, session.poll, job.exchange_timeout)
        self.transport = TRANSPORTS[job.carrier](control)
        self.clock = Clock(progress.phase, self.bytes_sent)
        self.options = session.together(lambda: job.options(source.options, source.K))
        session.together(self._check_job)
        self.piece_length = piece_length(source.T) if job.reproducible else None
        self.segments = partition(source.cu_seqlens, self.transport.size, cuts, self.piece_length or CHUNK)
        self.segment = self.segments[self.transport.rank]
        self.threads = session.threads()
        self.state_dtype = layout.working_type(source.dtypes, self.options.gate)
        self.engine = session.together(self._make_engine)
        session.together(self._check_engine)
        self._check_resources()

    def bytes_sent(self):
        """Bytes that this rank has handed to others: control messages, boundaries and sums, rows of the output."""
        return self.session.control.sent + self.transport.sent + self.session.transport.sent

    def _make_engine(self):
        name = "numpy" if self.job.reproducible and self.job.engine == "auto" else self.job.engine
        if name in ("auto", "cuda") and cuda_usable():
            self.session.use_device(self.job.oversubscribe)
        return make_engine(name, self.session.poll, self.threads)

    def _check_engine(self):
        """Whether the engine takes this input is told before anything is read."""
        source = self.source
        shapes = {"q": (source.H, source.K), "k": (source.H, source.K), "v": (source.HV, source.V),
                  "g": (source.HV, source.K), "beta": (source.HV,)}
        empty = {name: np.empty((0,) + shape, source.dtypes[name]) for name, shape in shapes.items()}
        operands = Operands(**empty, A_log=None, dt_bias=None, cu_seqlens=np.array([0, 0]), state_dtype=self.state_dtype)
        try:
            self.engine.check(operands, self.options)
        except InputError as error:
            raise InputError(f"{self.job.input}: {error}") from None

    def _check_job(self):
        if self.job.save_boundary and self.job.shard == "heads":
            raise InputError("save_boundary: expected ranks that share tokens, got --shard heads, where nothing crosses")
        if self.job.backward and not self.source.has("d_out"):
            raise InputError(f"{self.job.input}: /inputs/d_out: expected a dataset for --backward, got nothing")
        conv = self.source.conv
        if self.job.reproducible and conv is not None and max(x.shape[1] for x in conv.weights.values()) > SHORTEST:
            raise InputError(f"reproducible: expected a short convolution of at most {SHORTEST} tokens beside it")
        if self.session.rank == 0:
            # A name that cannot be written is told now, not after the work.
            check_output(self.job.output, self.job.force, self.job.io)

    def _check_resources(self):
        source, job = self.source, self.job
        segment = self.segment
        self.memory = resources.share_bytes(source, source.dtypes, segment.stop - segment.start, len(segment.pieces),
                                            self._held(), job.backward)
        self.disk = resources.output_bytes(self.file, source.dtypes, job.backward)
        on_node = sum(self.session.node.allgather(self.memory))
        self.session.together(lambda: resources.check_memory(on_node) if self.session.node.rank == 0 else None)
        if self.session.rank == 0:
            resources.check_disk(job.output, self.disk)

    def _held(self):
        """Bytes of boundary matrices on this rank, at most: a decay skip may make it less."""
        source = self.source
        both = crossings(self.segments, source.HV, source.K, source.V, self.state_dtype, self.job.backward)
        return held_bytes(self.job.scan, both)[self.segment.rank]

    def print_plan(self):
        """What would be done, on rank 0's standard output."""
        rows = self.session.control.collect((self.segment, self.memory), "collecting the plan")
        if self.session.rank:
            return
        if self.job.json:
            print(json.dumps({
                "engine": self.engine.name, "shard": self.job.shard, "scan": self.job.scan, "output_bytes": self.disk,
                "options": self.options.to_dict(),
                "ranks": [{"tokens": [segment.start, segment.stop], "memory_bytes": memory,
                           "pieces": [[p.sequence, p.start, p.stop] for p in segment.pieces]} for segment, memory in rows]}))
            return
        print(f"engine {self.engine.name}, shard {self.job.shard}, scan {self.job.scan}, output {self.disk} bytes, options {self.options}")
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
            problem = self.problem = self._take_to_engine()
        try:
            forward = problem.forward(self.initial_states, save=self.job.backward)
        except UnsuitableScan as error:
            raise AgreedError(str(error)) from None
        gradients = None
        if self.job.backward:
            gradients = problem.backward(forward, self.d_out, self.d_final_states)
        skips, self.paths = [], problem.paths(forward)
        # Before anybody opens the output: a failure must not leave a part of it.
        self.within = problem.rows_within(forward)
        if self.session.size > 1:
            with self.clock("bounds"):
                skips = self.session.control.collect(problem.skip_rows(forward, gradients), "collecting the bounds")
        results = (self.options, problem, forward, gradients)
        if self.heads is None:
            parts = output_parts(self.file, *results, self.job.save_boundary)
        else:
            with self.clock("write"):
                parts = output_parts_of_heads(self.file, *results, self.session.transport, self.heads)
        write = WRITERS[self.job.io]
        with self.clock("write"):
            report = write(self.session, self.job.output, self.job.force, parts,
                           lambda: describe(self, skips, digest, parts))
        return report

    def _take_to_engine(self):
        """Everything per token to where the engine works; the problem that is to be computed."""
        operands = self.engine.take(self.operands)
        if self.job.backward:
            self.d_out = self.engine.take_array(self.d_out)
        return RankProblem(self.engine, self.transport, self.job.scan, self.segments, operands, self.options,
                           self.clock, self.convolution, piece_length=self.piece_length)

    def _read(self):
        source, segment = self.source, self.segment
        rows = {name: source.read(name, segment.start, segment.stop) for name in PER_TOKEN
                if source.conv is None or name not in CHANNELS}
        self.convolution = None
        if source.conv is not None:
            self.convolution = self._read_convolution()
            rows |= {name: self.convolution.forward(name) for name in CHANNELS}
        parameter = lambda name: source.read_whole(name) if source.has(name) and self.options.gate != "log" else None
        self.operands = Operands(**rows, A_log=parameter("A_log"), dt_bias=parameter("dt_bias"),
                                 cu_seqlens=segment.cu_seqlens, state_dtype=self.state_dtype)
        self.initial_states = self._read_states("initial_state", segment.started)
        if self.job.backward:
            self.d_out = source.read("d_out", segment.start, segment.stop)
            self.d_final_states = self._read_states("d_final_state", segment.ended)

    def _read_convolution(self):
        """The share's rows before the convolution, and its halo from in front of the share."""
        source, segment, take = self.source, self.segment, self.engine.take_array
        raw = {name: source.read(name, segment.start, segment.stop) for name in CHANNELS}
        halos = {}
        for name in CHANNELS:
            channels, W = source.conv.weights[name].shape
            halo = np.zeros((len(segment.pieces), W - 1, channels), raw[name].dtype)
            first, last = halo_tokens(segment, source.cu_seqlens, W)
            if last > first:
                halo[0, W - 1 - (last - first) :] = source.read(name, first, last).reshape(last - first, channels)
            halos[name] = halo
        taken = lambda arrays: {name: take(x) for name, x in arrays.items()}
        conv = replace(source.conv, weights=taken(source.conv.weights), biases=taken(source.conv.biases))
        return ShareConvolution(conv, self.segments, segment.rank, source.cu_seqlens, taken(raw), taken(halos))

    def _read_states(self, name, sequences):
        """[sequences,HV,K,V] of the file, None where it has none."""
        if not self.source.has(name):
            return None
        stored = self.source.read_states(name, sequences.start, sequences.stop)
        return layout.state_out(stored, self.options.state_layout).astype(self.state_dtype, copy=False)

    def _check_finite(self):
        segment, where = self.segment, f"{self.job.input}: rank {self.session.rank}: /inputs/"
        if self.heads is not None:
            where = f"{where.removesuffix('/inputs/')}heads counted from key head {self.heads[self.session.rank].start}: /inputs/"
        first = segment.pieces[0].sequence if segment.pieces else 0
        gradient = {"d_out": self.d_out} if self.job.backward else {}
        check_values(self.operands, self.options, where, segment.start, first, **gradient)
        if self.initial_states is not None:
            check_states(where, segment.started.start, initial_state=self.initial_states)
        if self.job.backward and self.d_final_states is not None:
            check_states(where, segment.ended.start, d_final_state=self.d_final_states)
