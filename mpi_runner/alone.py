"""What stands for MPI where no MPI library can be loaded and one process is the whole job: the calls that one rank makes.

Names and meanings are those of mpi4py.MPI.
"""

import os
import socket


class Request:
    """Of a call that was done at once, or is done once the rank has sent to itself."""

    def __init__(self, done=True):
        self.done = done

    def Test(self):
        return self.done

    def Wait(self):
        return self.done


class Datatype:
    """Of one rank nothing is sent, so no type has a size."""

    def Create_contiguous(self, count):
        return self

    def Commit(self):
        return self

    def Free(self):
        pass


class Comm:
    """A communicator of this process alone."""

    rank, size = 0, 1

    def __init__(self):
        # Receives that wait for their messages, messages that wait for their receives, each in order.
        self._receives, self._messages = [], []

    def Irecv(self, received, source):
        request = Request(done=False)
        self._receives.append((received[0], request))
        self._deliver()
        return request

    def Isend(self, mine, dest):
        self._messages.append(mine[0].copy())
        self._deliver()
        return Request()

    def _deliver(self):
        while self._receives and self._messages:
            received, request = self._receives.pop(0)
            received[...] = self._messages.pop(0)
            request.done = True

    def Dup(self):
        return self

    def Split_type(self, kind):
        return self

    def allgather(self, value):
        return [value]

    def Ibarrier(self):
        return Request()

    def Iallgather(self, mine, received):
        received[...] = mine
        return Request()

    def Iallgatherv(self, mine, received):
        received[0][...] = mine[0]
        return Request()

    def Iallreduce(self, mine, result, op):
        result[...] = mine
        return Request()

    def Abort(self, code):
        os._exit(code)


COMM_WORLD = COMM_SELF = Comm()
COMM_TYPE_SHARED = MAX = SUM = None
BYTE = INT64_T = FLOAT = DOUBLE = UINT16_T = Datatype()


def Get_processor_name():
    return socket.gethostname()


def Get_library_version():
    return "none: one process without an MPI library"
