"""The NumPy engine: the chunked algorithm, slab by slab, with groups of heads and sequences shared out among threads.

A task is a few heads of a few sequences; it walks them in slabs of chunks small enough to stay in cache, so memory
beside inputs and results does not grow with T, except for the chunk states that the backward needs.
"""

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np

from .. import chunked, subnormals
from ..affine import Affine
from ..arrays import to_host
from ..chunk_table import ChunkTable
from ..gate import Activated, Gradients, activate, activate_adjoint
from ..layout import Operands, zero_states
from ..threads import blas_limit, thread_count
from .base import Engine, Forward, Saved

# Chunk length of this engine, a power of two: longer chunks make larger matrix products, shorter ones less work
# inside the chunk.
CHUNK_LENGTH = 32

# Bytes of one [chunks, heads, C, K] array of a slab; about a dozen are alive at once.
SLAB_BYTES = 1 << 19

# Value heads of a task, where there are enough to keep all threads busy.
HEADS_PER_TASK = 8


# Between two calls of `poll` while threads work.
POLL_SECONDS = 0.005


class Halted(Exception):
    """Another task failed or the caller stopped the work; never seen outside."""


class HostEngine(Engine):
    """The four stages in NumPy. Several threads may call, each with an engine of its own; they take turns."""

    name = "numpy"

    def __init__(self, poll=lambda: None, threads=None):
        super().__init__(poll)
        self.threads = threads or thread_count()
        self._halted = False
        self._heads_per_task = None

    @classmethod
    def memory(cls, tokens, sequences, state_bytes):
        # A state enters every chunk, the last of a sequence may be short.
        return (-(-tokens // CHUNK_LENGTH) + sequences) * state_bytes

    def take_array(self, x):
        return to_host(x)

    def fix_sums(self):
        # A task's heads decide how long its slabs are, and a slab is what is summed at once.
        self._heads_per_task = HEADS_PER_TASK

    def summarise(self, operands, options, initial_state, transition):
        K, V = operands.K, operands.V
        state = initial_state.copy()
        if transition:
            # The transition is the recurrence run from the identity with v = 0: K more columns.
            state = np.concatenate([state, Affine.identity(state.shape[:2], K, V, state.dtype, np).M], axis=3)

        def work(task):
            carried = task.pick(state)
            for slab in task.slabs():
                self._check_halted()
                x = task.activate(slab)
                chunk = chunked.prepare(None, x.k, x.log_decay, x.beta)
                v = x.v
                if transition:
                    v = np.concatenate([v, np.zeros(v.shape[:-1] + (K,), v.dtype)], axis=-1)
                for place in slab.steps:
                    now, running = chunk.at(place), place.stop - place.start
                    U = chunked.write(now, carried[:running], v[place])
                    carried[:running] = chunked.next_state(now, carried[:running], U)
            task.put(state, carried)

        self._run(work, self._tasks(operands, options))
        return Affine(np.ascontiguousarray(state[..., V:]) if transition else None,
                      np.ascontiguousarray(state[..., :V]))

    def forward(self, operands, options, initial_state, save):
        if initial_state is None:
            initial_state = zero_states(operands)
        out = np.empty(operands.v.shape, operands.v.dtype)
        final_state = initial_state.copy()

        def work(task):
            carried = task.pick(final_state)
            for slab in task.slabs():
                self._check_halted()
                x = task.activate(slab)
                chunk = task.prepare(x)
                result = np.empty_like(x.v)
                for place in slab.steps:
                    now, running = chunk.at(place), place.stop - place.start
                    state = carried[:running]
                    if save:
                        task.states[slab.chunks][place] = state
                    U = chunked.write(now, state, x.v[place])
                    result[place] = chunked.read(now, state, U)
                    carried[:running] = chunked.next_state(now, state, U)
                task.scatter(slab, result, out)
            task.put(final_state, carried)

        tasks = self._tasks(operands, options)
        if save:
            tasks = [task.with_states() for task in tasks]
        self._run(work, tasks)
        return Forward(out, final_state, Saved(operands, options, initial_state, tasks) if save else None)

    def summarise_backward(self, operands, options, d_out, d_final_state):
        d_state = d_final_state.copy()
        self._run(lambda task: self._sweep(task, d_out, d_state), self._tasks(operands, options))
        return d_state

    def backward(self, saved, d_out, d_final_state):
        operands = saved.operands
        empty = lambda x: np.empty(x.shape, x.dtype)
        d_state = d_final_state.copy()
        result = Gradients(
            dq=empty(operands.q), dk=empty(operands.k), dv=empty(operands.v), dg=empty(operands.g),
            dbeta=empty(operands.beta), dA_log=None, ddt_bias=None, d_initial_state=d_state,
        )
        HV, K = operands.value_heads, operands.K
        # One row a task, added up in the tasks' order: the sum does not depend on which thread was first.
        dA_log, ddt_bias = np.zeros((len(saved.states), HV)), np.zeros((len(saved.states), HV, K))

        def work(index):
            task = saved.states[index]

            def gradients(slab, x, chunk, d_slab, d_state_out, X):
                d = chunked.gradients(chunk, task.states[slab.chunks], x.v, d_slab, d_state_out, X)
                raw = task.activate_adjoint(slab, d)
                for name in ("dq", "dk", "dv", "dg", "dbeta"):
                    task.scatter_tokens(slab, getattr(raw, name), getattr(result, name), name in ("dq", "dk"))
                dA_log[index, task.heads] += raw.dA_log
                ddt_bias[index, task.heads] += raw.ddt_bias

            self._sweep(task, d_out, d_state, gradients)

        self._run(work, range(len(saved.states)))
        return replace(result, dA_log=dA_log.sum(axis=0), ddt_bias=ddt_bias.sum(axis=0))

    def _sweep(self, task, d_out, d_state, visit=None):
        """Carry the state's gradient from the last chunk to the first; show every slab to `visit`."""
        carried = task.pick(d_state)
        for slab in reversed(list(task.slabs())):
            self._check_halted()
            x = task.activate(slab)
            chunk = task.prepare(x)
            d_slab = task.gather_output_gradient(slab, d_out)
            local_dU, local_d_state = chunked.read_adjoint(chunk, d_slab)
            X, d_state_out = np.empty_like(x.v), np.empty_like(local_d_state)
            for place in reversed(slab.steps):
                now, running = chunk.at(place), place.stop - place.start
                d_state_out[place] = carried[:running]
                X[place] = chunked.write_adjoint(now, carried[:running], local_dU[place])
                carried[:running] = chunked.previous_d_state(now, carried[:running], local_d_state[place], X[place])
            if visit is not None:
                visit(slab, x, chunk, d_slab, d_state_out, X)
        task.put(d_state, carried)

    def _tasks(self, operands, options):
        group = operands.value_heads // operands.heads
        per_task = self._heads_per_task or min(HEADS_PER_TASK, -(-operands.value_heads // self.threads))
        shared_heads = max(1, per_task // group)
        chunk_bytes = CHUNK_LENGTH * max(operands.K, operands.V) * operands.state_dtype.itemsize * shared_heads * group
        chunks_per_slab = max(1, SLAB_BYTES // chunk_bytes)
        tables = ChunkTable.split(operands.cu_seqlens, CHUNK_LENGTH, chunks_per_slab)
        tasks = []
        for first in range(0, operands.heads, shared_heads):
            shared = slice(first, min(first + shared_heads, operands.heads))
            heads = slice(shared.start * group, shared.stop * group)
            tasks += [Task.of(operands, options, table, shared, heads, chunks_per_slab) for table in tables]
        return tasks

    def _run(self, work, tasks):
        """Call work on every task, on as many threads as there are; the BLAS shares out what is left.

        Numbers below the type's normal ones count as zero on these threads, which end with the call.
        """
        threads = max(1, min(self.threads, len(tasks)))
        self._halted = False
        with (blas_limit(max(1, self.threads // threads)),
              ThreadPoolExecutor(threads, initializer=subnormals.flush) as pool):
            waiting = [pool.submit(work, task) for task in tasks]
            try:
                while waiting:
                    self.poll()
                    done, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            except BaseException:
                self._halted = True
                for future in waiting:
                    future.cancel()
                raise

    def _check_halted(self):
        """Called by every task between slabs: the calling thread may have given up."""
        if self._halted:
            raise Halted


@dataclass(frozen=True)
class Task:
    """Some heads of some sequences: operands holds those heads of all tokens (views)."""

    operands: Operands
    options: object
    table: ChunkTable
    shared: slice
    heads: slice
    chunks_per_slab: int
    states: np.ndarray | None = None

    @classmethod
    def of(cls, operands, options, table, shared, heads, chunks_per_slab):
        of_heads = lambda x: None if x is None else x[heads]
        mine = replace(operands, q=operands.q[:, shared], k=operands.k[:, shared], v=operands.v[:, heads],
                       g=operands.g[:, heads], beta=operands.beta[:, heads],
                       A_log=of_heads(operands.A_log), dt_bias=of_heads(operands.dt_bias))
        return cls(mine, options, table, shared, heads, chunks_per_slab)

    def with_states(self):
        """The same task with room for the state that enters each chunk, [chunks, heads, K, V]."""
        HV, K, V = self.operands.state_shape[1:]
        return replace(self, states=np.empty((self.table.chunks, HV, K, V), self.operands.state_dtype))

    def slabs(self):
        for steps in self.table.slabs(self.chunks_per_slab):
            yield self.table.slab(*steps)

    def pick(self, state):
        """This task's part of a state [N,HV,K,V], longest sequence first (a copy)."""
        return state[self.table.sequences, self.heads]

    def put(self, state, carried):
        state[self.table.sequences, self.heads] = carried

    def activate(self, slab):
        """The slab's activated inputs as chunks [chunks, heads, C, ...]; places without a token change no state."""
        C = self.table.C
        x = activate(self._gather(slab), self.options, self.operands.state_dtype)
        return Activated(*(_to_chunks(_blank(part, slab), C) for part in (x.q, x.k, x.v, x.log_decay, x.beta)))

    def prepare(self, x):
        scale = x.q.dtype.type(self.options.scale_for(self.operands.K))
        return chunked.prepare(x.q * scale, x.k, x.log_decay, x.beta)

    def gather_output_gradient(self, slab, d_out):
        d = d_out[:, self.heads][slab.tokens.ravel()].astype(self.operands.state_dtype)
        return _to_chunks(_blank(d, slab), self.table.C)

    def activate_adjoint(self, slab, d):
        """`Gradients` of the slab's raw tokens from its `ChunkGradients`."""
        scale = d.q.dtype.type(self.options.scale_for(self.operands.K))
        parts = (d.q * scale, d.k, d.v, d.log_decay, d.beta)
        d = Activated(*(_blank(_to_tokens(part), slab) for part in parts))
        return activate_adjoint(d, self._gather(slab), self.options, self.operands.state_dtype)

    def scatter(self, slab, result, into):
        """Chunks [chunks, heads, C, V] into the tokens of `into` [T,HV,V]."""
        self.scatter_tokens(slab, _to_tokens(result), into, False)

    def scatter_tokens(self, slab, rows, into, per_shared_head):
        heads = self.shared if per_shared_head else self.heads
        tokens = slab.tokens.ravel()
        if slab.valid is not None:
            rows, tokens = rows[slab.valid.ravel()], tokens[slab.valid.ravel()]
        into[tokens, heads] = rows

    def _gather(self, slab):
        tokens = slab.tokens.ravel()
        cut = {name: getattr(self.operands, name)[tokens] for name in ("q", "k", "v", "g", "beta")}
        return replace(self.operands, **cut)


def _blank(rows, slab):
    """Rows [chunks * C, ...] with zeros where the slab holds no token."""
    if slab.valid is None:
        return rows
    valid = slab.valid.reshape((-1,) + (1,) * (rows.ndim - 1))
    return np.where(valid, rows, rows.dtype.type(0))


def _to_chunks(rows, C):
    """[chunks * C, heads, ...] to [chunks, heads, C, ...], contiguous."""
    return np.ascontiguousarray(np.moveaxis(rows.reshape((-1, C) + rows.shape[1:]), 1, 2))


def _to_tokens(chunks):
    """[chunks, heads, C, ...] to [chunks * C, heads, ...]."""
    tokens = np.moveaxis(chunks, 2, 1)
    return tokens.reshape((-1,) + tokens.shape[2:])
