"""A problem in slabs: runs of chunks, across sequences, one after the other, where the whole would take too much memory.

Forward from the first slab to the last, backward from the last to the first. What a forward keeps of slabs are the
states that enter them; what a backward needs beside those it makes again when the slab's turn comes.
"""

from dataclasses import dataclass

import cupy
import numpy as np

from ...affine import Affine
from ...gate import Gradients
from ...layout import CHUNK, zero_states
from .problem import contiguous, take_problem


# Shares of the device's memory. A problem is cut where its scratch memory and records would take more than the first,
# which leaves as much to the tensors of the largest problem that is not cut; those of a slab then take the second.
WHOLE = 0.45
SLAB = 0.05


# Made in every saving call and therefore not frozen, which would take several times as long; nobody assigns to its fields.
@dataclass
class Kept:
    """What a forward left for its backward, beside its inputs.

    path: the Path whose backward it is for. record: what that path leaves of a problem that is one slab, or None: it
    needs nothing, or makes it again. slabs: the Slabs of the forward, None of one that was not cut; entering: the
    states [sequences of the slab,HV,K,V] in front of each of them.
    """

    path: object
    record: object = None
    slabs: list | None = None
    entering: list | None = None


@dataclass(frozen=True)
class Slab:
    """tokens: slice of the problem's. sequences: slice of those with tokens here. cu_seqlens: of their tokens here."""

    tokens: slice
    sequences: slice
    cu_seqlens: np.ndarray

    def take(self, operands):
        return operands.slice_tokens(self.tokens.start, self.tokens.stop, self.cu_seqlens)


def whole(operands):
    """The one Slab that is the whole problem."""
    return Slab(slice(0, operands.tokens), slice(0, operands.sequences), operands.cu_seqlens)


def cut_slabs(cu_seqlens, chunks):
    """The problem's tokens as Slabs of at most so many chunks, in order; none where there is no token."""
    counts = -(-np.diff(cu_seqlens) // CHUNK)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    slabs = []
    for first in range(0, int(offsets[-1]), chunks):
        behind = min(first + chunks, int(offsets[-1]))
        low = int(np.searchsorted(offsets, first, side="right")) - 1
        high = int(np.searchsorted(offsets, behind, side="left"))
        token = lambda n, chunk: int(min(cu_seqlens[n] + CHUNK * (chunk - offsets[n]), cu_seqlens[n + 1]))
        start, stop = token(low, first), token(high - 1, behind)
        bounds = np.clip(cu_seqlens[low : high + 1], start, stop) - start
        slabs.append(Slab(slice(start, stop), slice(low, high), bounds))
    return slabs


def forward(path, operands, problem, initial_state, save, poll):
    """(out [T,HV,V] of the element type, final state [N,HV,K,V], Kept or None, drops). initial_state: None for zeros.

    drops: (Slab, Cuts) wherever cuts were certified.
    problem: the whole of `operands` as a Problem.
    """
    chunks = chunks_of_slab(problem, path.forward_bytes(problem, save))
    out = problem.empty_like_values()
    if chunks is None:
        final_state = problem.empty_states()
        record, cuts = path.forward(problem, initial_state, save, out, final_state)
        kept = Kept(path.of_backward, record) if save else None
        return out, final_state, kept, () if cuts is None else ((whole(operands), cuts),)
    state, slabs, entering, drops = _states(initial_state, operands), cut_slabs(operands.cu_seqlens, chunks), [], []
    for slab in slabs:
        poll()
        part = take_problem(slab.take(operands), problem.options, problem.device)
        entering.append(state[slab.sequences].copy())
        written, reached = part.empty_like_values(), part.empty_states()
        _, cuts = path.forward(part, entering[-1], False, written, reached)
        drops += [(slab, cuts)] if cuts is not None else []
        out[slab.tokens], state[slab.sequences] = written, reached
    return out, state, Kept(path.of_backward, None, slabs, entering) if save else None, tuple(drops)


def summarise(path, operands, problem, initial_state, transition, poll):
    """Affine(M, S) of every sequence; S is reached from initial_state; M None unless `transition`."""
    chunks = chunks_of_slab(problem, path.summary_bytes(problem))
    if chunks is None:
        return path.summarise(problem, initial_state, transition)
    N, HV, K, V = initial_state.shape
    S = initial_state.copy()
    M = Affine.identity((N, HV), K, V, S.dtype, cupy).M if transition else None
    for slab in cut_slabs(operands.cu_seqlens, chunks):
        poll()
        part = take_problem(slab.take(operands), problem.options, problem.device)
        pair = path.summarise(part, S[slab.sequences].copy(), transition)
        S[slab.sequences] = pair.S
        if transition:
            M[slab.sequences] = pair.M @ M[slab.sequences]
    return Affine(M, S)


def summarise_backward(path, operands, options, d_out, d_final_state, device, poll):
    """The gradient of the initial states [N,HV,K,V] reached from d_final_state."""
    operands, d_out = path.gradient_operands(operands, options, d_out)
    chunks = path.backward_chunks(operands)
    if chunks is None:
        problem = take_problem(operands, options, device)
        return path.summarise_backward(problem, contiguous(d_out, problem.v.dtype),
                                       contiguous(d_final_state, d_final_state.dtype))
    d_state = d_final_state.copy()
    for slab in reversed(cut_slabs(operands.cu_seqlens, chunks)):
        poll()
        part, d_slab = _take(operands, options, d_out, slab, device)
        d_state[slab.sequences] = path.summarise_backward(part, d_slab, d_state[slab.sequences])
    return d_state


def backward(saved, d_out, d_final_state, device, poll):
    """(`Gradients` of a forward that left a Kept as `saved.states`, drops as `forward` tells them)."""
    given, options, kept = saved.operands, saved.options, saved.states
    operands, d_out = kept.path.gradient_operands(given, options, d_out)
    poll()
    if kept.record is not None:
        part, d_whole = _take(operands, options, d_out, whole(operands), device)
        gradients = _empty_gradients(operands, part.v.dtype)
        d_state, *sums, cuts = kept.path.backward(part, kept.record, None, d_whole,
                                                  contiguous(d_final_state, d_final_state.dtype), gradients)
        return _handed_out(given, gradients, sums, d_state), () if cuts is None else ((whole(given), cuts),)
    slabs, entering = kept.slabs, kept.entering
    if slabs is None:
        slabs = cut_slabs(operands.cu_seqlens, kept.path.backward_chunks(operands))
        entering = _enter(kept.path, operands, options, saved.initial_state, slabs, device, poll)
    gradients, d_state, drops = None, d_final_state.copy(), []
    sums = cupy.zeros(given.value_heads, "f8"), cupy.zeros((given.value_heads, given.K), "f8")
    for slab, state in zip(reversed(slabs), reversed(entering)):
        poll()
        part, d_slab = _take(operands, options, d_out, slab, device)
        gradients = gradients or _empty_gradients(operands, part.v.dtype)
        views = {name: x[slab.tokens] for name, x in gradients.items()}
        leaving = d_state[slab.sequences].copy()
        d_state[slab.sequences], *added, cuts = kept.path.backward(part, None, state, d_slab, leaving, views)
        drops += [(slab, cuts)] if cuts is not None else []
        sums = [x + y for x, y in zip(sums, added)]
    return _handed_out(given, gradients or _empty_gradients(given, given.v.dtype), sums, d_state), tuple(drops)


def _empty_gradients(operands, dtype):
    return {"d" + name: cupy.empty(getattr(operands, name).shape, dtype) for name in ("q", "k", "v", "g", "beta")}


def _handed_out(given, gradients, sums, d_initial_state):
    """The Gradients, each in its input's type."""
    typed = {name: x.astype(getattr(given, name[1:]).dtype, copy=False) for name, x in gradients.items()}
    return Gradients(**typed, dA_log=sums[0], ddt_bias=sums[1], d_initial_state=d_initial_state)


def chunks_of_slab(problem, size):
    """Chunks of a slab of a problem whose scratch memory and records take `size` bytes; None where it needs no cut."""
    memory = problem.target.memory if size else 0
    return None if size <= WHOLE * memory else max(1, int(problem.most_chunks * SLAB * memory / size))


def _states(initial_state, operands):
    return zero_states(operands) if initial_state is None else initial_state.copy()


def _enter(path, operands, options, initial_state, slabs, device, poll):
    """The states [sequences of the slab,HV,K,V] that enter each slab: by a pass over all of them but the last."""
    state, entering = _states(initial_state, operands), []
    for slab in slabs:
        entering.append(state[slab.sequences].copy())
        if slab is not slabs[-1]:
            poll()
            part = take_problem(slab.take(operands), options, device)
            state[slab.sequences] = path.summarise(part, entering[-1], False).S
    return entering


def _take(operands, options, d_out, slab, device):
    """The slab's Problem, and its d_out as the problem has v."""
    part = take_problem(slab.take(operands), options, device)
    return part, contiguous(d_out[slab.tokens], part.v.dtype)
