"""The closed formulas of work, held against loops that do the work multiply-add by multiply-add and get it right."""

import numpy as np
import pytest

import kda_engine as kda
from kda_engine.bench import roofline
from kda_engine.bench.shapes import draw, draw_gradients, parse

K, V, C = 2, 3, 4
LENGTHS = (7, 4, 0, 1)
OPTIONS = kda.Options(gate="log", beta="value", qk_l2norm=False, scale=1.0)


class Count:
    """Products by loops. done: multiply-adds so far."""

    def __init__(self):
        self.done = 0

    def product(self, a, b, left=None, wanted=None):
        """a b; left: the entries of a that are not zero by structure; wanted: those of the result to be formed."""
        result = np.zeros((len(a), b.shape[1]))
        for i, j, l in np.ndindex(len(a), b.shape[1], len(b)):
            if (left is None or left[i, l]) and (wanted is None or wanted[i, j]):
                result[i, j] += a[i, l] * b[l, j]
                self.done += 1
        return result

    def pairs(self, rows, columns, gamma, wanted):
        """sum_d rows_id e^(gamma_id - gamma_jd) columns_jd where wanted."""
        result = np.zeros((len(rows), len(rows)))
        for i, j, d in np.ndindex(len(rows), len(rows), rows.shape[1]):
            if wanted[i, j]:
                result[i, j] += rows[i, d] * np.exp(gamma[i, d] - gamma[j, d]) * columns[j, d]
                self.done += 1
        return result

    def weighted(self, weights, x, gamma, wanted, to_rows):
        """sum_j w_ij e^(gamma_i - gamma_j) x_j by row i, or sum_i w_ij e^(gamma_i - gamma_j) x_i by column j."""
        result = np.zeros_like(x)
        for i, j, d in np.ndindex(len(x), len(x), x.shape[1]):
            if wanted[i, j]:
                into, of = (i, j) if to_rows else (j, i)
                result[into, d] += weights[i, j] * np.exp(gamma[i, d] - gamma[j, d]) * x[of, d]
                self.done += 1
        return result

    def inverse(self, L):
        """(I + L)^-1 for a strictly lower L."""
        N = np.eye(len(L))
        for i in range(len(L)):
            for j in range(i):
                N[i, j] = -L[i, j]
                for l in range(j + 1, i):
                    N[i, j] -= L[i, l] * N[l, j]
                    self.done += 1
        return N


class Chunk:
    """One chunk of one head by the operator's formulas."""

    def __init__(self, count, q, k, v, g, beta, state):
        self.count, self.q, self.k, self.beta, self.state = count, q, k, beta[:, None], state
        self.below, self.upto = np.tri(len(q), k=-1, dtype=bool), np.tri(len(q), dtype=bool)
        self.gamma = np.cumsum(g, axis=0)
        self.K_in, self.Q_in = k * np.exp(self.gamma), q * np.exp(self.gamma)
        self.K_out, self.total = k * np.exp(self.gamma[-1] - self.gamma), np.exp(self.gamma[-1])[:, None]
        self.G = count.pairs(k, k, self.gamma, self.below)
        self.P = count.pairs(q, k, self.gamma, self.upto)
        self.N = count.inverse(self.beta * self.G)
        self.R = v - count.product(self.K_in, state)
        written = self.beta * self.R
        self.U = written + count.product(self.N, written, left=self.below)
        self.out = count.product(self.Q_in, state) + count.product(self.P, self.U, left=self.upto)
        self.after = self.total * state + count.product(self.K_out.T, self.U)

    def backward(self, count, d_out, d_after):
        """(dq, dk, dv, dbeta, gradient of the state before)."""
        dU = count.product(self.P.T, d_out, left=self.upto.T) + count.product(self.K_out, d_after)
        X = dU + count.product(self.N.T, dU, left=self.below.T)
        dR = self.beta * X
        dP = count.product(d_out, self.U.T, wanted=self.upto)
        dL = -count.product(X, self.U.T, wanted=self.below)
        dG = self.beta * dL
        dQ_in, dK_in = count.product(d_out, self.state.T), -count.product(dR, self.state.T)
        dK_out = count.product(self.U, d_after.T)
        dq = count.weighted(dP, self.k, self.gamma, self.upto, True) + np.exp(self.gamma) * dQ_in
        a = count.weighted(dG, self.k, self.gamma, self.below, True) + np.exp(self.gamma) * dK_in
        b = (count.weighted(dG, self.k, self.gamma, self.below, False)
             + count.weighted(dP, self.q, self.gamma, self.upto, False)
             + np.exp(self.gamma[-1] - self.gamma) * dK_out)
        dbeta = (X * self.R).sum(axis=1) + (dL * self.G).sum(axis=1)
        d_state = self.total * d_after + count.product(self.Q_in.T, d_out) - count.product(self.K_in.T, dR)
        return dq, a + b, dR, dbeta, d_state


@pytest.fixture(scope="module")
def loops():
    """What the loops computed, what the recurrence says, and both counts, of one head over LENGTHS."""
    random = np.random.default_rng(3)
    T, N = sum(LENGTHS), len(LENGTHS)
    x = {"q": random.standard_normal((T, 1, K)), "k": random.standard_normal((T, 1, K)) / 2,
         "v": random.standard_normal((T, 1, V)), "g": -random.random((T, 1, K)), "beta": random.random((T, 1))}
    state, d_out = random.standard_normal((N, 1, K, V)), random.standard_normal((T, 1, V))
    d_state = random.standard_normal((N, 1, K, V))
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    fwd = kda.forward(**x, initial_state=state, cu_seqlens=bounds, options=OPTIONS, engine="reference")
    grads = kda.backward(fwd, d_out, d_state)
    expected = {"out": fwd.out, "final_state": fwd.final_state, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv,
                "dbeta": grads.dbeta, "d_initial_state": grads.d_initial_state}
    found = {name: np.zeros_like(y) for name, y in expected.items()}
    forward, backward = Count(), Count()
    for n in range(N):
        carried, chunks = state[n, 0], []
        for start in range(bounds[n], bounds[n + 1], C):
            place = slice(start, min(start + C, bounds[n + 1]))
            chunk = Chunk(forward, *(y[place, 0] for y in x.values()), carried)
            carried, found["out"][place, 0] = chunk.after, chunk.out
            chunks.append((place, chunk))
        found["final_state"][n, 0] = carried
        d_carried = d_state[n, 0]
        for place, chunk in reversed(chunks):
            *parts, d_carried = chunk.backward(backward, d_out[place, 0], d_carried)
            for name, part in zip(("dq", "dk", "dv", "dbeta"), parts):
                found[name][place, 0] = part
        found["d_initial_state"][n, 0] = d_carried
    return found, expected, forward.done, backward.done


def test_the_loops_compute_the_operator(loops):
    found, expected, *_ = loops
    for name in expected:
        assert kda.compare(found[name], expected[name]) < 1e-12, name


def test_flops_are_what_the_loops_did(loops):
    *_, forward, backward = loops
    assert roofline.forward_flops(LENGTHS, 1, K, V, C) == 2 * forward
    assert roofline.backward_flops(LENGTHS, 1, K, V, C) == 2 * backward


def test_flops_grow_with_heads_and_whole_chunks():
    assert roofline.forward_flops((64,), 6, 8, 8, 16) == 6 * 4 * roofline.forward_flops((16,), 1, 8, 8, 16)
    assert roofline.backward_flops((64,), 6, 8, 8, 16) == 6 * 4 * roofline.backward_flops((16,), 1, 8, 8, 16)


def test_bytes_are_those_of_all_arrays_of_the_calls():
    shape = parse("2x20x3")
    inputs, gradients = draw(shape, "weak", module=np), draw_gradients(shape, module=np)
    fwd = kda.forward(**inputs, cu_seqlens=shape.cu_seqlens, engine="numpy")
    written = [fwd.out, fwd.final_state]
    assert roofline.forward_bytes(inputs) == sum(x.nbytes for x in (*inputs.values(), *written))
    results = vars(kda.backward(fwd, **gradients)).values()
    assert roofline.backward_bytes(inputs) == sum(x.nbytes for x in (*inputs.values(), *gradients.values(), *results))


def test_the_floor_is_five_and_fourteen_passes():
    """Of one bfloat16 tensor [T,H,128] each, as the performance page counts; the rest is a per cent."""
    inputs = draw(parse("512x2"), "strong", module=np)
    one = inputs["q"].nbytes
    states = 2 * inputs["initial_state"].nbytes
    assert roofline.forward_bytes(inputs) - states == pytest.approx(5 * one, rel=0.01)
    both = roofline.forward_bytes(inputs) + roofline.backward_bytes(inputs)
    assert both - 2.5 * states == pytest.approx(14 * one, rel=0.01)
