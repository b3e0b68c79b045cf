"""Time of a run in closed form, from rates that somebody states. Exchanges are taken not to overlap with work."""

from dataclasses import dataclass

from .traffic import boundary_bytes


@dataclass(frozen=True)
class Rates:
    """What one rank does in a second.

    forward, backward, summary: tokens times value heads. bandwidth: bytes sent to other ranks. latency: seconds that
    each message takes beside its bytes.
    """

    forward: float
    backward: float
    summary: float
    bandwidth: float
    latency: float


def predict(segments, HV, state, transition, scan, backward, rates):
    """Seconds that the slowest rank takes, files left out; arguments as in `traffic.boundary_bytes`."""
    forward = boundary_bytes(segments, state, transition, scan, False)
    ahead = [(segment, segment.left, segment.right) for segment in segments]
    seconds = _direction(ahead, HV, state, forward, scan, rates.forward, rates)
    if backward:
        both = boundary_bytes(segments, state, transition, scan, True)
        behind = [(segment, segment.right, segment.left) for segment in reversed(segments)]
        sent = [total - there for total, there in zip(both, forward)]
        seconds += _direction(behind, HV, state, sent, scan, rates.backward, rates)
    return seconds


def _direction(chain, HV, state, sent, scan, rate, rates):
    """One direction's seconds. chain: (segment, piece that waits, piece that feeds) in the order states travel."""
    work = [(segment.stop - segment.start) * HV / rate for segment, _, _ in chain]
    if scan == "serial":
        return _one_after_the_other(chain, work, HV, state, rate, rates)
    summary = max(_tokens(feeds) for _, _, feeds in chain) * HV / rates.summary
    exchange = rounds(scan, len(chain)) * rates.latency + max(sent) / rates.bandwidth if any(sent) else 0.0
    return summary + exchange + max(work)


def _one_after_the_other(chain, work, HV, state, rate, rates):
    """Each rank does what waits for nobody, then receives a state, then does the piece that waited for it."""
    handed_on, slowest = 0.0, 0.0
    for (_, waits, feeds), mine in zip(chain, work):
        waiting = _tokens(waits) * HV / rate
        end = mine - waiting
        if waits is not None:
            end = max(end, handed_on + rates.latency + state / rates.bandwidth) + waiting
        # A piece that only feeds was done first, so that its state left before the rank began to wait.
        handed_on = end if feeds is waits else _tokens(feeds) * HV / rate
        slowest = max(slowest, end)
    return slowest


def rounds(scan, ranks):
    """Messages that follow each other in one exchange over so many ranks."""
    return {"allgather": (ranks - 1).bit_length(), "exscan": (ranks - 1).bit_length(), "heads": 2}[scan]


def _tokens(piece):
    return 0 if piece is None else piece.stop - piece.start
