"""The NumPy engine's memory grows linearly in T and stays under three times the inputs beside what it hands out."""

import tracemalloc

import pytest

import kda_engine as kda
from kda_engine import cases, layout
from kda_engine.engines.host import HostEngine


def peak(work):
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_memory_stays_under_three_times_the_inputs(tokens, monkeypatch):
    # A slab is of fixed size; at these lengths it must not hide behind the inputs.
    monkeypatch.setattr("kda_engine.engines.host.SLAB_BYTES", 1 << 16)
    case = cases.make("ordinary", tokens=tokens, heads=2, K=64, V=64)
    given = (case.q, case.k, case.v, case.g, case.beta)
    inputs = sum(x.nbytes for x in given)
    forward, _ = peak(lambda: kda.forward(*given, engine="numpy", save=False))
    assert forward <= 3 * inputs
    fwd = kda.forward(*given, engine="numpy")
    backward, _ = peak(lambda: kda.backward(fwd, case.d_out))
    assert backward <= 3 * inputs


def test_nothing_is_kept_without_save():
    case = cases.make("ordinary")
    fwd = kda.forward(case.q, case.k, case.v, case.g, case.beta, engine="numpy", save=False)
    with pytest.raises(kda.InputError, match="save=True"):
        kda.backward(fwd, case.d_out)


def test_the_engine_gives_the_same_bits_on_any_number_of_threads():
    case = cases.make("ragged", tokens=300, heads=4)
    results = []
    for threads in (1, 2, 3):
        operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                                  case.options.gate)
        engine = HostEngine(threads=threads)
        zeros = layout.state_in("initial_state", None, operands, "KV")
        fwd = engine.forward(operands, case.options, zeros, save=True)
        results.append((fwd.out, engine.backward(fwd.saved, case.d_out, zeros)))
    for out, grads in results[1:]:
        assert (out == results[0][0]).all()
        assert (grads.dg == results[0][1].dg).all() and (grads.dk == results[0][1].dk).all()
