"""How measurements on several ranks are made: by the first R of a job's ranks, started together, the slowest counts."""

import socket
import time

import numpy as np

from kda_engine.errors import InputError

from ..exchange import Exchange

# What moves the messages, by the transport's name.
TRANSPORTS = {"mpi": Exchange}


def rank_counts(given, size, least):
    """How many ranks take part, rising: `given`, or powers of two and all. Raises InputError."""
    powers = (1 << i for i in range(size.bit_length()))
    counts = sorted(set(given or {size, *powers} - set(range(least))))
    if not least <= counts[0] <= counts[-1] <= size:
        raise InputError(f"ranks: expected {least} to {size}, got {', '.join(map(str, counts))}")
    return counts


def on_first_ranks(session, counts, measure):
    """The rows that measure(exchange, transport's name) returns for each transport on the first R ranks, R in counts.

    Collective; all ranks get the first one's rows.
    """
    rows = []
    for ranks in counts:
        comm = session.comm.Split(0 if session.rank < ranks else 1, session.rank)
        if session.rank < ranks:
            for transport, make in TRANSPORTS.items():
                rows += measure(make(comm, session.poll, session.exchange.timeout), transport)
        # Those who take no part must not disturb: this wait sleeps.
        session.exchange.wait(session.comm.Ibarrier(), "waiting for the measuring ranks")
        comm.Free()
    return session.exchange.collect(rows, "sharing the measurements")[0]


def slowest_seconds(exchange, call, samples):
    """Seconds of every sample of a collective call, the slowest rank's; all ranks start each one together."""
    taken = []
    for _ in range(samples):
        exchange.wait(exchange.comm.Ibarrier(), "starting together")
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return np.max(exchange.collect(taken, "collecting times"), axis=0).tolist()


def count_nodes(session):
    """How many machines the job runs on."""
    return len(set(session.exchange.collect(socket.gethostname(), "counting the nodes")))
