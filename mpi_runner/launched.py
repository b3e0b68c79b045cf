"""How this process was started, told from the environment alone: MPI need not be there."""

import os

# Where launchers tell a process its rank.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def launched_rank():
    """This process's rank as its launcher says, 0 without one."""
    return next((int(os.environ[name]) for name in _said()), 0)


def launched():
    """Whether a launcher started this process as a rank. A Slurm batch script, rank 0 of no step, is none."""
    said = _said()
    return bool(said) and (said != ["SLURM_PROCID"] or "SLURM_STEP_ID" in os.environ)


def _said():
    return [name for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()]
