"""A job's life on one rank: MPI, signals, agreement between ranks, and one way out for every kind of failure."""

import os
import platform
import signal
import socket
import sys
import time
import traceback

from kda_engine.errors import InputError
from kda_engine.threads import threads_asked_for

from .exit_codes import INTERNAL, STOPPED, USAGE
from .heartbeat import Heartbeat
from .interruption import SIGNALS
from .launched import launched_size
from .mpi import MPI
from .parallel.control import Control, ExchangeTimeout
from .parallel.transports import HostTransport
from .resources import ResourceError

# How long a stopping rank waits for the others before it ends the job on its own.
STOP_SECONDS = 3.0

# Time for the launcher to pass on the last words of a rank that ends the job.
FORWARDING_SECONDS = 0.5

# Between two signs of life of all ranks, where the time limit leaves room for as much.
HEARTBEAT_SECONDS = 2.0


class Stopped(Exception):
    """A signal asked the job to stop."""


class AgreedError(InputError):
    """An InputError that every rank raises at the same place."""


class Session:
    """Use as a context manager around a job; `code` is the exit code after it.

    An InputError of one rank should be made everybody's by `together`: the job then ends in order, code 2 everywhere.
    Whatever else one rank raises ends the job on all ranks at once: code 70, 2 for an InputError, 75 after a signal or
    a time limit.
    """

    def __init__(self, timeout=600.0):
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        _check_size(self.size)
        self._leaving = self.comm.Dup()
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.heartbeat = Heartbeat(self.comm.Dup())
        self.control = Control(self.comm, self.poll, timeout, lambda: self.heartbeat.seen)
        # Rows of files travel by it whatever else does.
        self.transport = HostTransport(self.control)
        self.code = 0
        self.on_poll = lambda: None
        # What computes on this rank, for reports.
        self.device = f"{platform.machine()} CPU"
        self._signal, self._settled = None, False
        self._parent = os.getppid()

    def __enter__(self):
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None or isinstance(error, AgreedError):
            self.heartbeat.finish(lambda joined: self.control.largest(joined, "ending the job"))
        if error is None or isinstance(error, SystemExit):
            return False
        if isinstance(error, AgreedError):
            self.say(f"error: {error}")
            self.code = USAGE
            return True
        if isinstance(error, InputError):
            print(f"kda-engine: rank {self.rank}: error: {error}", file=sys.stderr, flush=True)
            self._end(USAGE)
        if isinstance(error, ResourceError):
            print(f"kda-engine: rank {self.rank}: error: {error}", file=sys.stderr, flush=True)
            self._end(INTERNAL)
        if isinstance(error, (Stopped, ExchangeTimeout)):
            print(f"kda-engine: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            self._meet()
            self._end(STOPPED)
        # One write, so that the lines of several ranks do not mix.
        sys.stderr.write(f"kda-engine: rank {self.rank} on {socket.gethostname()} failed:\n"
                         + "".join(traceback.format_exception(kind, error, trace)))
        self._end(INTERNAL)

    def poll(self):
        """Keeps transfers moving; raises Stopped once a signal has come or the launcher has died."""
        self.control.progress()
        self.heartbeat.beat(min(HEARTBEAT_SECONDS, self.control.timeout / 4))
        self.on_poll()
        if self._settled:
            return
        # Some launchers leave their ranks behind when they are killed outright.
        if self.size > 1 and os.getppid() != self._parent:
            raise Stopped("stopped: the launcher is gone")
        if self._signal is not None:
            raise Stopped(f"stopped by {signal.Signals(self._signal).name}")

    def settle(self):
        """Agree that all work is done and the output is to get its name: from here on signals come too late. Collective."""
        self.poll()
        # Before the agreement: a rank that is waiting for it has nothing left to stop.
        self._settled = True
        self.control.largest(0, "agreeing to finish the output")

    def say(self, text):
        """A line on rank 0's standard error."""
        if self.rank == 0:
            print(f"kda-engine: {text}", file=sys.stderr, flush=True)

    def together(self, work):
        """work() on every rank; if any rank raises InputError, all raise the first such rank's as AgreedError."""
        problem, result = None, None
        try:
            result = work()
        except InputError as error:
            problem = str(error)
        problems = [text for text in self.control.collect(problem, "agreeing on the input") if text is not None]
        if problems:
            raise AgreedError(problems[0])
        return result

    def threads(self):
        """Collective within the node. Threads for this rank: the cores it may run on, shared with the ranks of its node that may run there too."""
        if threads_asked_for() is not None:
            return threads_asked_for()
        mine = os.sched_getaffinity(0)
        sharing = sum(bool(mine & other) for other in self.node.allgather(mine))
        return max(1, len(mine) // sharing)

    def device_number(self, devices):
        """Which of so many visible GPUs is this rank's: its number on the node, modulo them."""
        return self.node.rank % devices

    def use_device(self, oversubscribe):
        """Make this rank's GPU current.

        Raises InputError when two ranks of the node would share one, unless `oversubscribe`.
        """
        import cupy

        device = cupy.cuda.Device(self.device_number(cupy.cuda.runtime.getDeviceCount()))
        device.use()
        self.device = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        taken = self.node.allgather(device.pci_bus_id)
        if len(set(taken)) < len(taken) and not oversubscribe:
            raise InputError(f"ranks: expected a GPU for each of the {len(taken)} ranks on {socket.gethostname()}, got "
                             f"{len(set(taken))} GPUs; --oversubscribe lets ranks share, --engine numpy needs none")

    def _note(self, number, frame):
        self._signal = number

    def _meet(self):
        """Give the other ranks the time to notice the signal too, so that all can clean up behind themselves."""
        request, deadline = self._leaving.Ibarrier(), time.monotonic() + STOP_SECONDS
        while not request.Test() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end(self, code):
        sys.stdout.flush()
        sys.stderr.flush()
        if self.size > 1:
            # Launchers drop what they have not forwarded yet when a job is aborted.
            time.sleep(FORWARDING_SECONDS)
            # Some libraries return from this before the launcher has ended the process.
            self.comm.Abort(code)
        os._exit(code)


def _check_size(size):
    """Raises InputError where a launcher started more ranks than MPI knows: each takes itself for the whole job."""
    started, variable = launched_size()
    if size < started:
        raise InputError(f"ranks: expected {started}, as {variable} says, got {size}: the launcher and the MPI library speak "
                         "different start-up protocols; with srun try --mpi=pmix or --mpi=pmi2, else the MPI library's own "
                         "mpirun")
