"""How this process was started, told from the environment alone: MPI need not be there."""

import os

# Where launchers tell a process its rank.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")

# Where they tell how many they started. A launcher that starts through srun has fewer tasks in its step than ranks.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_rank():
    """This process's rank as its launcher says, 0 without one."""
    return next((_number(name) for name in _said()), 0)


def launched():
    """Whether a launcher started this process as a rank. A Slurm batch script, rank 0 of no step, is none."""
    said = _said()
    return bool(said) and (said != ["SLURM_PROCID"] or "SLURM_STEP_ID" in os.environ)


def launched_size():
    """(ranks, variable): the most ranks that any launcher says it started, 1 where none says so."""
    return max(((_number(name) or 1, name) for name in SIZE_VARIABLES), key=lambda said: said[0])


def _said():
    return [name for name in RANK_VARIABLES if _number(name) is not None]


def _number(name):
    """An environment variable as a number, None where it is not set to one."""
    said = os.environ.get(name, "")
    # Python takes other scripts' digits, and superscripts, for digits too.
    return int(said) if said.isascii() and said.isdigit() and len(said) < 10 else None
