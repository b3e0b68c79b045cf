"""MPI for all modules of this package: mpi4py's, or its stand-in for one process where no MPI library can be loaded."""

import os

from kda_engine.errors import InputError

from .launched import SIZE_VARIABLES, launched, launched_size


def load():
    """The module. Raises InputError where several ranks were started, or nobody says how many."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        ranks, _ = launched_size()
        if ranks > 1 or launched() and not any(name in os.environ for name in SIZE_VARIABLES):
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"ranks: expected an MPI library for {ranks if ranks > 1 else 'several'} ranks, got none that "
                             f"can be loaded: pip install 'kda-engine[mpich]' brings one, `module load` of a cluster's "
                             f"mpich or openmpi finds its own ({reason})") from None
        from . import alone as MPI
    return MPI


MPI = load()
