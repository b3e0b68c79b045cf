"""Run under mpirun: a main job in which something goes wrong. Arguments: fault, input, output.

Faults: raise (rank 1 raises in its forward), kill (rank 1 kills itself there), raise-writing (rank 1 raises while it
hands its rows over), raise-root-writing (rank 0 raises then), disk (files may not grow past 64 KiB on rank 0), bad-row
(rank 1 finds its rows unreadable), slow (every rank waits in its forward; for signals), silent (rank 1 never joins),
busy (rank 1 works for 5 s where the time limit is 1 s).
"""

import os
import resource
import signal
import sys
import time

from kda_engine import InputError
from kda_engine.engines.host import HostEngine
from kda_engine.hdf5.inputs import InputFile
from mpi_runner import gathering
from mpi_runner.job import Job
from mpi_runner.main_job import run_job
from mpi_runner.parallel import skips
from mpi_runner.session import Session


def misbehave(fault, rank):
    """Put the fault in place on this rank."""
    forward = HostEngine.forward

    def in_forward(work):
        """`work` instead of the forward; a forward of no tokens only asks what the engine takes."""
        HostEngine.forward = lambda self, operands, *given, **named: (
            work if operands.tokens else forward)(self, operands, *given, **named)

    def failing_forward(self, *arguments):
        if fault == "raise":
            raise RuntimeError("planted fault in forward")
        os.kill(os.getpid(), signal.SIGKILL)

    def slow_forward(self, *arguments):
        print(f"waiting {os.getpid()};", flush=True)
        while True:
            self.poll()
            time.sleep(0.01)

    def busy_forward(self, *arguments):
        end = time.monotonic() + 5
        while time.monotonic() < end:
            self.poll()
            time.sleep(0.01)
        return forward(self, *arguments)

    def failing_bounds(self, *given, **named):
        raise RuntimeError("planted fault in bounds")

    def failing_rows(self, rank, start, stop):
        raise RuntimeError("planted fault in writing")

    def failing_read(self, name, start, stop):
        raise InputError(f"{self.path}: /inputs/{name}: planted checksum failure")

    if fault in ("raise", "kill") and rank == 1:
        in_forward(failing_forward)
    elif fault == "slow":
        in_forward(slow_forward)
    elif fault == "bounds" and rank == 1:
        skips.report_row = failing_bounds
    elif fault == "raise-writing" and rank == 1 or fault == "raise-root-writing" and rank == 0:
        gathering.Part.take = failing_rows
    elif fault == "bad-row" and rank == 1:
        InputFile.read = failing_read
    elif fault == "disk" and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    elif fault == "busy" and rank == 1:
        in_forward(busy_forward)
    elif fault == "silent" and rank == 1:
        in_forward(lambda self, *arguments: time.sleep(120))


def main(fault, source, output):
    timeout = {"silent": 3.0, "busy": 1.0}.get(fault, 600.0)
    with Session() as session:
        misbehave(fault, session.rank)
        run_job(session, Job.resolve({"input": source, "output": output, "backward": True, "force": True,
                                      "engine": "numpy", "exchange_timeout": timeout}, None))
    return session.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
