"""Threads: how many, the BLAS's limit when calls overlap, and subnormal numbers in the engine's threads alone."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from oracle import assert_close, run, upcast
from threadpoolctl import ThreadpoolController

import kda_engine as kda
from kda_engine import cases, subnormals
from kda_engine.compare import TOLERANCES
from kda_engine.threads import blas_limit, thread_count, threads_asked_for


def blas():
    """Threads of each BLAS of this process now."""
    return [library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"]


def in_threads(*works):
    """Each of works() in a thread of its own; the results."""
    results = [None] * len(works)

    def call(i):
        results[i] = works[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_asked_for(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_asked_for() == thread_count() == 3
    for other in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", other)
        assert threads_asked_for() is None and thread_count() >= 1


def test_calls_from_two_threads_leave_the_blas_its_threads():
    """The second begins while the first is under way and ends behind it: each on its own would put back a limit of 1."""
    before, first_is_in, first_is_out = blas(), threading.Event(), threading.Event()

    def first():
        with blas_limit(1):
            first_is_in.set()
            time.sleep(0.05)
            seen = blas()
        first_is_out.set()
        return seen

    def second():
        first_is_in.wait(10)
        with blas_limit(1):
            first_is_out.wait(10)
            return blas()

    limited = in_threads(first, second)
    assert all(set(seen) <= {1} for seen in limited) and blas() == before


def test_a_call_that_fails_lets_the_next_one_in():
    before = blas()
    with pytest.raises(ZeroDivisionError), blas_limit(1):
        raise ZeroDivisionError
    assert in_threads(lambda: run(cases.make("ordinary"), "numpy"))[0] is not None and blas() == before


def test_threads_may_call_the_engine():
    names, before = ("ragged", "heads-differ", "packed", "strong"), blas()
    expected = [run(cases.make(name), "numpy") for name in names]
    found = in_threads(*(lambda name=name: [run(cases.make(name), "numpy") for _ in range(3)] for name in names))
    assert blas() == before
    for repeated, once in zip(found, expected):
        for result in repeated:
            for name, value in once.items():
                assert np.array_equal(result[name], value), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_busy_process_computes():
    with blas_limit(1):
        child = os.fork()
        if child == 0:
            with blas_limit(1):
                os._exit(0)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child waits for a lock that nobody holds")


def keeps_subnormals():
    tiny = np.full(64, np.finfo("f4").tiny)
    return bool((tiny * np.float32(0.5) != 0).all())


def test_subnormals_are_flushed_in_one_thread_alone():
    flushed, kept = in_threads(lambda: (subnormals.flush(), keeps_subnormals()), keeps_subnormals)
    # Where the switch is not known nothing changes.
    assert flushed[1] == (not flushed[0]) and kept and keeps_subnormals()


def test_an_unknown_machine_keeps_subnormals(monkeypatch):
    monkeypatch.setattr(subnormals.platform, "machine", lambda: "riscv64")
    assert in_threads(lambda: (subnormals.flush(), keeps_subnormals())) == [(False, True)]


def test_a_register_that_looks_different_is_left_alone(monkeypatch):
    monkeypatch.setattr(subnormals, "_REGISTERS", {subnormals.platform.machine(): (0, 0x8040, 0xFFFFFFFF, 0x12345678)})
    assert in_threads(lambda: (subnormals.flush(), keeps_subnormals())) == [(False, True)]


def test_the_calling_thread_keeps_its_subnormals():
    case = cases.make("strong", tokens=100)
    run(case, "numpy")
    assert keeps_subnormals()


@pytest.mark.parametrize("name", ["strong", "vanishing", "saturated", "thousands"])
def test_gradients_of_strong_decays_keep_their_digits(name):
    """Value by value, down to where float32's normal numbers end; sums of float32 terms may cancel, most do not."""
    case = cases.make(name)
    computed, exact = run(case, "numpy"), run(upcast(case), "reference")
    assert_close(computed, exact, TOLERANCES["f4"])
    for key in ("out", "dq", "dk", "dv", "dg", "dbeta"):
        near = abs(computed[key] - exact[key]) <= 1e-3 * abs(exact[key])
        assert np.count_nonzero(near | (abs(exact[key]) < 1e-35)) >= 0.97 * exact[key].size, key


def test_float64_keeps_its_small_numbers():
    case = cases.make("strong", dtype="float64")
    case.v[:] *= 1e-200
    assert kda.compare(run(case, "numpy")["out"] * 1e200, run(case, "reference")["out"] * 1e200) <= 1e-11
