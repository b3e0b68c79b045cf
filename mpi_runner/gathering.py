"""The output file, filled from all ranks: each writes its own rows into it, or all go through rank 0, or one shard a rank."""

from contextlib import ExitStack, contextmanager

import numpy as np

from kda_engine.arrays import to_host
from kda_engine.finite import NotFinite
from kda_engine.hdf5.chunk_writer import ChunkWriter
from kda_engine.hdf5.results import ResultWriter
from kda_engine.hdf5.shards import ShardWriter, check_shard_folder, remove_shards, shard_folder

from .parallel.transports.host import SLAB_BYTES


class Part:
    """One tensor of the output as this rank knows it.

    shape, dtype: of the whole. spans: (first row, row count) of every rank, in row order. blocks: this rank's rows,
    a list of arrays (NumPy or of a device) that follow each other. not_finite: `NotFinite` of this rank's rows, by their
    number in the whole; complete after `slabs` has come to its end.
    """

    def __init__(self, name, shape, dtype, spans, blocks):
        self.name, self.shape, self.dtype = name, tuple(shape), np.dtype(dtype)
        self.spans, self.blocks = spans, [block for block in blocks if len(block)]
        self.not_finite = NotFinite()

    def slabs(self, rank):
        """The rows of `rank`, this one, as (row within the rank, rows), slabs of `slab_rows` rows whatever the blocks' sizes."""
        count, step = sum(len(block) for block in self.blocks), slab_rows(self.shape, self.dtype)
        for at in range(0, count, step):
            yield at, self.take(rank, at, min(at + step, count))

    def take(self, rank, start, stop):
        """Rows [start, stop), at least one, counted within `rank`, this one: contiguous, in host memory."""
        starts = np.cumsum([0] + [len(block) for block in self.blocks])
        rows = [block[max(start - first, 0) : stop - first]
                for block, first in zip(self.blocks, starts) if first < stop and first + len(block) > start]
        rows = [to_host(part) for part in rows]
        rows = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
        self.not_finite.add(self.spans[rank][0] + start, rows)
        return rows


def slab_rows(shape, dtype):
    return max(1, SLAB_BYTES // max(1, int(np.prod(shape[1:])) * np.dtype(dtype).itemsize))


def check_output(path, force, io):
    """Raise InputError for a name that cannot be written; what is tried leaves nothing behind. io: as `Job.io`."""
    ResultWriter(path, force=force).abandon()
    if io == "shards":
        check_shard_folder(path)


def write_direct(session, path, force, parts, describe):
    """Every rank's rows into one file by the rank itself, chunk by chunk; returns the report (rank 0).

    A chunk that holds rows of several ranks is written by the rank that has its first row; the others send it theirs. So
    does everybody to rank 0 for a dataset smaller than a page or two, since a page must not have two writers. Where some
    rank does not see the file that rank 0 makes, all rows go through rank 0 instead.
    """
    control = session.control
    with ExitStack() as stack:
        writer, made = None, None
        if session.rank == 0:
            writer = stack.enter_context(ResultWriter(path, force=force))
            for part in parts:
                writer.create(part.name, part.shape, part.dtype, early=True)
            made = writer.shared()
        temporary, places = control.collect(made, "opening the output")[0]
        try:
            chunks = stack.enter_context(ChunkWriter(temporary, places, session.threads()))
        except OSError:
            chunks = None
        if not all(control.collect(chunks is not None, "opening the output")):
            if writer is not None:
                writer.abandon()
            return write_gathered(session, path, force, parts, describe)
        for part in parts:
            if part.name in places:
                _write_part(session, chunks, part, places[part.name])
        chunks.sync()
        return _finish(session, writer, describe)


# Chunks of fewer bytes go to rank 0.
_OWN_CHUNK = 1 << 16


def _write_part(session, chunks, part, places):
    rank, transport, rows_of_chunk = session.rank, session.transport, places.chunk_rows
    owner = lambda chunk: _rank_with(part.spans, chunk * rows_of_chunk) if places.chunk_bytes >= _OWN_CHUNK else 0
    first, count = part.spans[rank]
    what, sending, mine = f"writing {part.name}", [], []
    for chunk in range(first // rows_of_chunk, -(-(first + count) // rows_of_chunk)) if count else ():
        if owner(chunk) == rank:
            mine.append(chunk)
            continue
        stop = min(first + count, (chunk + 1) * rows_of_chunk)
        sending.append(part.take(rank, max(0, chunk * rows_of_chunk - first), stop - first))
        # Kept until they are sent.
        sending.append(transport.start_send(sending[-1], owner(chunk)))
    if places.chunk_bytes < _OWN_CHUNK and rank == 0:
        mine = range(len(places.offsets))

    def blocks():
        for chunk in mine:
            begin, end = chunk * rows_of_chunk, min((chunk + 1) * rows_of_chunk, part.shape[0])
            rows = []
            for source, (start, number) in enumerate(part.spans):
                low, high = max(begin, start), min(end, start + number)
                if low < high and source == rank:
                    rows.append(part.take(rank, low - start, high - start))
                elif low < high:
                    rows.append(transport.receive((high - low,) + part.shape[1:], part.dtype, source, what))
            yield chunk, rows[0] if len(rows) == 1 else np.concatenate(rows)

    chunks.write(part.name, blocks(), session.poll)
    for requests in sending[1::2]:
        transport.wait(requests, what)


def _rank_with(spans, row):
    """The rank that has the row."""
    return next(rank for rank, (first, count) in enumerate(spans) if first <= row < first + count)


def write_gathered(session, path, force, parts, describe):
    """Every rank's rows through rank 0 into one file; returns the report (rank 0).

    describe() -> (report, provenance) on rank 0, called when all rows are on their way; collective.
    """
    transport = session.transport
    with ExitStack() as stack:
        writer = None
        if session.rank == 0:
            writer = stack.enter_context(ResultWriter(path, force=force))
            for part in parts:
                writer.create(part.name, part.shape, part.dtype)
        for part in parts:
            for rank, (first, count) in enumerate(part.spans):
                if rank == session.rank == 0:
                    for at, rows in part.slabs(session.rank):
                        session.poll()
                        writer.write(part.name, first + at, rows)
                elif rank == session.rank:
                    for _, rows in part.slabs(session.rank):
                        transport.send(rows, 0, f"sending {part.name}")
                elif session.rank == 0:
                    step = slab_rows(part.shape, part.dtype)
                    for at in range(0, count, step):
                        shape = (min(step, count - at),) + part.shape[1:]
                        rows = transport.receive(shape, part.dtype, rank, f"receiving {part.name} from rank {rank}")
                        writer.write(part.name, first + at, rows)
        return _finish(session, writer, describe)


def write_shards(session, path, force, parts, describe):
    """One shard a rank, and a main file on rank 0 that maps and lists them; returns the report (rank 0)."""
    control = session.control
    folder = control.collect(shard_folder(path) if session.rank == 0 else None, "naming the shards")[0]
    with ExitStack() as stack:
        writer = None
        if session.rank == 0:
            writer = stack.enter_context(ResultWriter(path, force=force))
            finished = stack.enter_context(_removed_unless_kept(folder))
        with ShardWriter(folder, session.rank) as shard:
            for part in parts:
                first, count = part.spans[session.rank]
                shard.create(part.name, first, (count,) + part.shape[1:], part.dtype)
                for at, rows in part.slabs(session.rank):
                    session.poll()
                    shard.write(part.name, at, rows)
            mine = shard.finish()
        shards = control.collect(mine, "listing the shards")
        if session.rank == 0:
            writer.link_shards(shards, {p.name: p.shape for p in parts}, {p.name: p.dtype for p in parts})
        report = _finish(session, writer, describe)
        if session.rank == 0:
            finished()
    return report


@contextmanager
def _removed_unless_kept(folder):
    kept = []
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            remove_shards(folder)


def _finish(session, writer, describe):
    # All ranks' descriptions are collected before rank 0 closes the file.
    report, provenance = describe()
    session.settle()
    if writer is not None:
        writer.finish(report, provenance)
    session.control.largest(0, "finishing the output")
    return report


# By the value of `--io`.
WRITERS = {"auto": write_direct, "direct": write_direct, "gather": write_gathered, "shards": write_shards}
