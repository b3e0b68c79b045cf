"""The emulation as an engine, so that every case and every comparison of the tests runs against it."""

from dataclasses import dataclass

import numpy as np

from kda_engine.affine import Affine
from kda_engine.engines.base import Engine, Forward, Saved
from kda_engine.gate import Gradients
from kda_engine.layout import zero_states

from .chain import run, run_back, tile_of
from .chunks import ChunkTokens, prepare
from .gates import activate_beta
from .gradients import gradients
from .pieces import Pieces
from .problem import Problem
from .tiles import TileTokens, tiles_of


@dataclass(frozen=True)
class Kept:
    """What a forward leaves for its backward; transitions: of the pieces, None where nothing is cut."""

    problem: Problem
    pieces: Pieces
    chunks: ChunkTokens
    operands: object
    records: object
    transitions: np.ndarray


class EmulatedEngine(Engine):
    """piece: chunks of a piece at most, None for whole sequences."""

    name = "emulated"

    def __init__(self, poll=lambda: None, piece=None):
        super().__init__(poll)
        self.piece = piece

    def forward(self, operands, options, initial_state, save):
        if initial_state is None:
            initial_state = zero_states(operands)
        problem, pieces, chunks, prepared = self._prepare(operands, options)
        values = chunks.gather(operands.v)
        begin, transitions = pieces.zeros_but(pieces.first, initial_state), None
        if pieces.cut:
            reached = run(problem, chunks, prepared, values, begin, False, queries=False)[1]
            transitions = self._transitions(problem, pieces, chunks, prepared)
            begin = pieces.enter(initial_state, transitions, reached)
        out, states, records = run(problem, chunks, prepared, values, begin, save)
        final = np.empty(initial_state.shape, "f4")
        final[pieces.sequence[pieces.last]] = states[pieces.last]
        saved = None
        if save:
            kept = Kept(problem, pieces, chunks, prepared, records, transitions)
            saved = Saved(operands, options, initial_state, kept)
        return Forward(_scatter(chunks, out, operands.v.dtype, operands.v.shape), final, saved)

    def summarise(self, operands, options, initial_state, transition):
        problem, pieces, chunks, prepared = self._prepare(operands, options)
        values = chunks.gather(operands.v)
        reached = run(problem, chunks, prepared, values, pieces.zeros_but(pieces.first, initial_state), False,
                      queries=False)[1]
        transitions = self._transitions(problem, pieces, chunks, prepared) if transition or pieces.cut else None
        S, M = np.empty(initial_state.shape, "f4"), None
        entering = pieces.enter(initial_state, transitions, reached) if pieces.cut else None
        left = lambda i: reached[i] if pieces.first[i] else reached[i] + transitions[i] @ entering[i]
        for i in np.flatnonzero(pieces.last):
            S[pieces.sequence[i]] = left(i)
        if transition:
            M = np.empty(transitions.shape[:0] + (operands.sequences,) + transitions.shape[1:], "f4")
            for i, n in enumerate(pieces.sequence):
                M[n] = transitions[i] if pieces.first[i] else transitions[i] @ M[n]
        return Affine(M, S)

    def summarise_backward(self, operands, options, d_out, d_final_state):
        problem, pieces, chunks, prepared = self._prepare(operands, options)
        return self._sweep(Kept(problem, pieces, chunks, prepared, None, None), d_out, d_final_state, False)[0]

    def backward(self, saved, d_out, d_final_state):
        kept, operands = saved.states, saved.operands
        problem, chunks = kept.problem, kept.chunks
        d_initial, records = self._sweep(kept, d_out, d_final_state, True)
        tokens = TileTokens(chunks, tile_of(chunks)[0])
        beta = activate_beta(operands.beta.astype("f4"), problem.options.beta)
        d = gradients(problem, tiles_of(problem, tokens, d_out, beta, kept.records, records))
        back = lambda x, like: _scatter(tokens, x, like.dtype, like.shape)
        grouped = lambda x, like: _sum_groups(_scatter(tokens, x, np.dtype("f4"), operands.g.shape), problem.group,
                                              like.dtype)
        return Gradients(
            dq=grouped(d.q, operands.q), dk=grouped(d.k, operands.k), dv=back(d.v, operands.v),
            dg=back(d.g, operands.g), dbeta=back(d.beta, operands.beta),
            dA_log=d.rate.sum(axis=0, dtype="f8"), ddt_bias=d.bias.sum(axis=0, dtype="f8"), d_initial_state=d_initial)

    def _prepare(self, operands, options):
        problem = Problem.of(operands, options)
        pieces = Pieces(operands.cu_seqlens, self.piece)
        chunks = ChunkTokens(pieces.starts, pieces.lengths)
        return problem, pieces, chunks, prepare(problem, chunks)

    def _transitions(self, problem, pieces, chunks, prepared):
        """The recurrence from the identity with no values."""
        heads, K = problem.g.shape[1:]
        identity = np.broadcast_to(np.eye(K, dtype="f4"), (len(pieces.starts), heads, K, K))
        nothing = np.zeros((len(chunks.tokens), heads, chunks.tokens.shape[1], K), "f4")
        return run(problem, chunks, prepared, nothing, identity, False, queries=False)[1]

    def _sweep(self, kept, d_out, d_final_state, saves):
        """(the first states' gradients, Records of the backward chain or None)."""
        problem, pieces, chunks, prepared = kept.problem, kept.pieces, kept.chunks, kept.operands
        given = chunks.gather(d_out)
        begin = pieces.zeros_but(pieces.last, d_final_state)
        if pieces.cut:
            reached = run_back(problem, chunks, prepared, given, begin, False)[0]
            transitions = kept.transitions
            if transitions is None:
                transitions = self._transitions(problem, pieces, chunks, prepared)
            begin = pieces.enter_back(d_final_state, transitions, reached)
        d_states, records = run_back(problem, chunks, prepared, given, begin, saves)
        d_initial = np.empty(d_final_state.shape, "f4")
        d_initial[pieces.sequence[pieces.first]] = d_states[pieces.first]
        return d_initial, records


def _scatter(places, x, dtype, shape):
    """Rows [n,heads,tokens,...] of chunks or tiles as [T,heads,...] of a type."""
    result = np.zeros(shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        result[places.tokens[places.valid]] = np.moveaxis(x, 2, 1)[places.valid].astype(dtype)
    return result


def _sum_groups(x, group, dtype):
    """Gradients by value head [T,HV,K] summed for the heads that share a key head, rounded once."""
    shares = x.reshape(x.shape[0], x.shape[1] // group, group, x.shape[2])
    with np.errstate(over="ignore", invalid="ignore"):
        return shares.sum(axis=2, dtype="f4").astype(dtype)
