"""The chunked algorithm: its stages against the operator's chunk formulas, the NumPy engine against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import arguments, assert_close, run, upcast

import kda_engine as kda
from kda_engine import cases, chunked
from kda_engine.compare import REPEATED_KEY_TOLERANCES, TOLERANCES
from kda_engine.engines import host

LENGTHS = (1, 2, 8, 16, 64)
DECAYS = {"mild": (0.0, 0.3), "strong": (0.0, 5.0), "thousands": (0.0, 3000.0), "none": (0.0, 0.0)}


def chunk_inputs(C, decay, K=5, V=3):
    random = np.random.default_rng(C)
    q, k = random.standard_normal((C, K)), random.standard_normal((C, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -random.uniform(*DECAYS[decay], (C, K))
    return q, k, log_decay, random.uniform(0, 1, C), random.standard_normal((C, V)), random.standard_normal((K, V))


def pairwise(C, log_decay):
    """e^(gamma_i - gamma_j) for j <= i from exact partial sums, else 0."""
    decay = np.zeros((C, C, log_decay.shape[1]))
    for j in range(C):
        for i in range(j, C):
            decay[i, j] = np.exp(log_decay[j + 1 : i + 1].sum(axis=0))
    return decay


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("C", LENGTHS)
def test_stages_equal_the_chunk_formulas(C, decay):
    q, k, log_decay, beta, v, S = chunk_inputs(C, decay)
    chunk = chunked.prepare(q, k, log_decay, beta)
    D = pairwise(C, log_decay)
    G = np.tril(np.einsum("id,ijd,jd->ij", k, D, k), -1)
    P = np.tril(np.einsum("id,ijd,jd->ij", q, D, k))
    into, out_of = np.exp(log_decay.cumsum(axis=0)), D[-1]
    U = np.linalg.solve(np.eye(C) + beta[:, None] * G, beta[:, None] * (v - (k * into) @ S))
    expected = {"G": G, "P": P, "N": np.linalg.inv(np.eye(C) + beta[:, None] * G), "K_in": k * into, "Q_in": q * into,
                "K_out": k * out_of, "total": into[-1]}
    assert_close({name: getattr(chunk, name) for name in expected}, expected, 1e-13)
    assert_close({"U": chunked.write(chunk, S, v)}, {"U": U}, 1e-13)
    assert_close({"out": chunked.read(chunk, S, U)}, {"out": (q * into) @ S + P @ U}, 1e-13)
    assert_close({"S": chunked.next_state(chunk, S, U)}, {"S": into[-1][:, None] * S + (k * out_of).T @ U}, 1e-13)


def test_a_chunk_without_queries_equals_one_with_them():
    q, k, log_decay, beta, v, S = chunk_inputs(16, "mild")
    with_q, without = chunked.prepare(q, k, log_decay, beta), chunked.prepare(None, k, log_decay, beta)
    assert np.array_equal(with_q.N, without.N) and np.array_equal(with_q.G, without.G)
    assert without.P is None and without.Q_in is None


def test_a_reset_inside_a_chunk_is_no_nan():
    q, k, log_decay, beta, v, S = chunk_inputs(16, "mild")
    log_decay[5], log_decay[9, 2], log_decay[10, 2] = -np.inf, -np.inf, -np.inf
    chunk = chunked.prepare(q, k, log_decay, beta)
    assert np.all(chunk.P[5:, :5] == 0) and np.all(chunk.G[5:, :5] == 0) and np.all(chunk.total == 0)
    U = chunked.write(chunk, S, v)
    d = chunked.gradients(chunk, S, v, v, S, chunked.write_adjoint(chunk, S, chunk.P.T @ v))
    for x in (U, d.q, d.k, d.v, d.log_decay, d.beta):
        assert np.isfinite(x).all()
    assert np.all(d.log_decay[5] == 0) and d.log_decay[9, 2] == 0


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("name", cases.names())
def test_engine_equals_the_oracle(name, dtype):
    case = cases.make(name, dtype=dtype)
    tolerance = (REPEATED_KEY_TOLERANCES if case.repeated_keys else TOLERANCES)[dtype]
    assert_close(run(case, "numpy"), run(upcast(case), "reference"), tolerance)


@pytest.mark.parametrize("name", ["odd-sizes", "grouped-heads", "ragged", "resets", "saturated", "conv"])
def test_other_seeds(name):
    for seed in (1, 2, 3):
        case = cases.make(name, seed=seed)
        assert_close(run(case, "numpy"), run(upcast(case), "reference"), TOLERANCES["f4"])


@pytest.mark.parametrize("dtype, rounding", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("name", ["ordinary", "ragged", "softplus-logit2", "log-value", "resets", "repeat"])
def test_half_types_cost_only_the_rounding_of_the_results(name, dtype, rounding):
    case = cases.make(name, dtype=dtype)
    result, exact = run(case, "numpy"), run(upcast(case), "reference")
    for key in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        assert str(result[key].dtype) == dtype
        # float16 rounds gradients below 6e-5 more coarsely: its subnormals have a fixed step.
        step = 0 if dtype == "bfloat16" else 2.0**-25
        assert (abs(result[key].astype("f8") - exact[key])
                <= rounding * abs(exact[key]) + step + 1e-5 * abs(exact[key]).max(initial=0)).all(), key
    wide = ("final_state", "d_initial_state") + (() if result["dA_log"] is None else ("dA_log", "ddt_bias"))
    for key in wide:
        assert result[key].dtype == np.float32
    assert_close({key: result[key] for key in wide}, {key: exact[key] for key in wide}, 2e-5)


@pytest.mark.parametrize("chunk_length", [4, 16, 32, 128])
@pytest.mark.parametrize("name", ["ragged", "many-short", "tokens-127", "thousands", "VK"])
def test_results_do_not_depend_on_the_chunk_length(monkeypatch, name, chunk_length):
    monkeypatch.setattr(host, "CHUNK_LENGTH", chunk_length)
    case = cases.make(name, dtype="f8")
    assert_close(run(case, "numpy"), run(case, "reference"), TOLERANCES["f8"])


@pytest.mark.parametrize("slab_bytes, heads_per_task", [(1, 1), (1 << 14, 1), (1 << 16, 2), (1 << 24, 64)])
@pytest.mark.parametrize("name", ["ragged", "many-short", "heads-differ", "grouped-heads", "empty-runs"])
def test_results_do_not_depend_on_slabs_and_tasks(monkeypatch, name, slab_bytes, heads_per_task):
    monkeypatch.setattr(host, "CHUNK_LENGTH", 16)
    monkeypatch.setattr(host, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(host, "HEADS_PER_TASK", heads_per_task)
    case = cases.make(name, dtype="f8")
    assert_close(run(case, "numpy"), run(case, "reference"), TOLERANCES["f8"])


def test_results_do_not_depend_on_threads(monkeypatch):
    case = cases.make("heads-differ", tokens=200)
    results = []
    for threads in (1, 3, 4):
        monkeypatch.setattr(host, "thread_count", lambda: threads)
        results.append(run(case, "numpy"))
    for other in results[1:]:
        assert_close(other, results[0], 1e-6)


def test_repeated_runs_are_bit_equal():
    case = cases.make("ragged")
    first, second = run(case, "numpy"), run(case, "numpy")
    for name in first:
        assert np.array_equal(first[name], second[name]), name


def test_thousands_of_short_sequences():
    random = np.random.default_rng(0)
    case = cases.make("ordinary", K=4, V=4, lengths=tuple(int(n) for n in random.integers(0, 4, 3000)))
    assert_close(run(case, "numpy"), run(upcast(case), "reference"), TOLERANCES["f4"])


def test_random_problems(monkeypatch):
    """Sizes, ragged lengths, cases and the engine's own constants drawn together: what no list of cases thinks of."""
    random = np.random.default_rng(7)
    draw = lambda *choices: choices[random.integers(len(choices))]
    for _ in range(60):
        heads = draw(1, 2, 3)
        monkeypatch.setattr(host, "CHUNK_LENGTH", draw(2, 4, 16, 64))
        monkeypatch.setattr(host, "SLAB_BYTES", draw(1, 1000, 1 << 16, 1 << 20))
        monkeypatch.setattr(host, "HEADS_PER_TASK", draw(1, 2, 3, 5))
        lengths = tuple(int(n) for n in random.integers(0, draw(3, 20, 70), draw(0, 1, 3, 8)))
        request = {"name": draw(*cases.names()), "seed": int(random.integers(1000)), "heads": heads,
                   "value_heads": heads * draw(1, 2, 3), "K": int(random.integers(2, 40)),
                   "V": int(random.integers(1, 40)), "lengths": lengths}
        case = cases.make(dtype="f8", **request)
        try:
            assert_close(run(case, "numpy"), run(case, "reference"), TOLERANCES["f8"])
        except AssertionError as error:
            raise AssertionError(f"{request}: {error}") from None


def test_a_long_sequence_keeps_its_accuracy():
    case = cases.make("weak", tokens=4096, heads=1, K=16, V=16)
    assert_close(run(case, "numpy"), run(upcast(case), "reference"), TOLERANCES["f4"])


def test_gradients_at_saturated_gates_keep_their_digits():
    """Where every gate is saturated dg is tiny; its error must be tiny beside dg itself, value by value."""
    case = cases.make("saturated", tokens=40)
    computed, exact = run(case, "numpy")["dg"], run(upcast(case), "reference")["dg"]
    # Where a gradient's float32 terms cancel there is nothing to be accurate to; most do not.
    near = abs(computed - exact) <= 1e-3 * abs(exact)
    assert np.count_nonzero(near | (abs(exact) < 1e-37)) >= 0.97 * exact.size


def test_sequences_do_not_touch_each_other():
    """A packed run equals every sequence on its own, bit for bit nothing of a neighbour."""
    case = cases.make("ragged", dtype="f8")
    whole = run(case, "numpy")
    per_token = ("q", "k", "v", "g", "beta", "d_out")
    for n, (start, stop) in enumerate(zip(case.cu_seqlens[:-1], case.cu_seqlens[1:])):
        alone = run(replace(case, cu_seqlens=None, initial_state=case.initial_state[n : n + 1],
                            d_final_state=case.d_final_state[n : n + 1],
                            **{name: getattr(case, name)[start:stop] for name in per_token}), "numpy")
        for name in ("out", "dq", "dk", "dv", "dg", "dbeta"):
            assert kda.compare(whole[name][start:stop], alone[name]) <= 1e-12
        for name in ("final_state", "d_initial_state"):
            assert kda.compare(whole[name][n : n + 1], alone[name]) <= 1e-12


def test_a_poisoned_sequence_stays_alone():
    case = cases.make("packed")
    case.v[40:49] = np.nan
    result = run(case, "numpy")
    clean = np.r_[0:33, 49:102]
    for name in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        assert np.isfinite(result[name][clean]).all(), name
        # dv does not depend on v at all.
        assert np.isnan(result[name][40:49]).any() == (name != "dv"), name
    assert np.isfinite(result["final_state"][[0, 2, 3]]).all() and np.isnan(result["final_state"][1]).any()


def test_a_future_token_changes_no_earlier_output():
    case = cases.make("tokens-127", dtype="f8")
    before = run(case, "numpy")["out"]
    for name in ("q", "k", "v", "g", "beta"):
        getattr(case, name)[90:] *= -1
    after = run(case, "numpy")["out"]
    assert np.allclose(after[:90], before[:90], rtol=1e-13, atol=1e-15) and not np.allclose(after[90:], before[90:])


@pytest.mark.parametrize("engine", ["numpy", "reference"])
def test_empty_sequences_pass_their_states_through(engine):
    case = cases.make("empty-all")
    result = run(case, engine)
    assert np.array_equal(result["final_state"], case.initial_state)
    assert np.array_equal(result["d_initial_state"], case.d_final_state)
    assert result["out"].shape == case.v.shape and not result["dA_log"].any() and not result["ddt_bias"].any()
    none = run(replace(case, initial_state=None, d_final_state=None), engine)
    assert none["final_state"].shape == case.initial_state.shape
    assert not none["final_state"].any() and not none["d_initial_state"].any()


def test_an_engine_leaves_its_inputs_alone():
    case = cases.make("VK")
    copies = {name: value.copy() for name, value in vars(case).items() if isinstance(value, np.ndarray)}
    run(case, "numpy")
    run(case, "reference")
    for name, value in copies.items():
        assert np.array_equal(getattr(case, name), value), name


def test_backward_needs_a_saved_forward():
    given, options = arguments(cases.make("ordinary"))
    fwd = kda.forward(*given, **options, engine="numpy", save=False)
    with pytest.raises(kda.InputError, match="fwd: expected a forward with save=True"):
        kda.backward(fwd, fwd.out)


def test_backward_twice_gives_the_same():
    case = cases.make("packed")
    given, options = arguments(case)
    fwd = kda.forward(*given, **options, engine="numpy")
    first, second = (kda.backward(fwd, case.d_out, case.d_final_state) for _ in range(2))
    for name, value in vars(first).items():
        assert np.array_equal(value, getattr(second, name)), name


def test_a_long_memory_keeps_float32s_digits():
    """Decay of a thousandth over thousands of tokens: what is rounded once a chunk must not be rounded once a token."""
    case = cases.make("log-value", tokens=2000, dtype="float32")
    case = replace(case, g=np.full_like(case.g, -1e-3), beta=np.full_like(case.beta, 0.01))
    computed, expected = run(case, "numpy"), run(upcast(case), "reference")
    names = ("out", "final_state", "d_initial_state")
    assert_close({name: computed[name] for name in names}, {name: expected[name] for name in names}, 1.4e-6)
