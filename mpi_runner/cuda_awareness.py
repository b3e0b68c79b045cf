"""Whether the MPI library takes device pointers. Handing them to one that does not is a segmentation fault."""

import ctypes

INFO_KEY = "mpi_memory_alloc_kinds"
QUERY = "MPIX_Query_cuda_support"


def cuda_awareness(comm):
    """{"cuda_aware": bool, "told_by": text} for the library behind an mpi4py communicator.

    Only a positive answer counts: False also stands for a library that cannot be asked.
    """
    kinds = _memory_kinds(comm)
    if any(kind.split(":")[0] == "cuda" for kind in kinds or ()):
        return {"cuda_aware": True, "told_by": f"{INFO_KEY}={','.join(kinds)}"}
    support = _query()
    if support is not None:
        return {"cuda_aware": support, "told_by": f"{QUERY}={int(support)}"}
    without = "" if kinds is None else f", no cuda in {INFO_KEY}"
    return {"cuda_aware": False, "told_by": f"nobody: no {QUERY}{without}"}


def _memory_kinds(comm):
    """What MPI 4.1 libraries say of the memory they take, a list; None from older ones."""
    info = comm.Get_info()
    try:
        said = info.Get(INFO_KEY)
    finally:
        info.Free()
    return None if said is None else [kind.strip() for kind in said.split(",")]


def _query():
    """The answer of the extension that Open MPI and MPICH share; None where it is missing."""
    from mpi4py import MPI

    # The extension module is linked to the library, so that its handle finds the library's symbols too.
    for handle in (MPI.__file__, None):
        function = getattr(ctypes.CDLL(handle), QUERY, None)
        if function is not None:
            function.argtypes, function.restype = [], ctypes.c_int
            return bool(function())
    return None
