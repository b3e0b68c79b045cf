"""How measurements on several ranks are made: by the first R of a job's ranks, started together, the slowest counts."""

import socket
import time

import numpy as np

from kda_engine.errors import InputError

from ..parallel.control import Control
from ..parallel.transports import TRANSPORTS


def rank_counts(given, size, least):
    """How many ranks take part, rising: `given`, or powers of two and all. Raises InputError."""
    powers = (1 << i for i in range(size.bit_length()))
    counts = sorted(set(given or {size, *powers} - set(range(least))))
    if not least <= counts[0] <= counts[-1] <= size:
        raise InputError(f"ranks: expected {least} to {size}, got {', '.join(map(str, counts))}")
    return counts


def on_first_ranks(session, counts, measure):
    """The rows that measure(transport) returns for each transport on the first R ranks, R in counts.

    Collective; all ranks get the first one's rows.
    """
    rows = []
    for ranks in counts:
        comm = session.comm.Split(0 if session.rank < ranks else 1, session.rank)
        if session.rank < ranks:
            control = Control(comm, session.poll, session.control.timeout)
            for make in TRANSPORTS.values():
                rows += measure(make(control))
        # Those who take no part must not disturb: this wait sleeps.
        session.control.wait(session.comm.Ibarrier(), "waiting for the measuring ranks")
        comm.Free()
    return session.control.collect(rows, "sharing the measurements")[0]


def slowest_seconds(control, call, samples):
    """Seconds of every sample of a collective call, the slowest rank's; all ranks start each one together."""
    taken = []
    for _ in range(samples):
        control.wait(control.comm.Ibarrier(), "starting together")
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return np.max(control.collect(taken, "collecting times"), axis=0).tolist()


def count_nodes(session):
    """How many machines the job runs on."""
    return len(set(session.control.collect(socket.gethostname(), "counting the nodes")))
