"""What pyproject.toml cannot say: the goldens of data/ belong to an installed package too."""

from setuptools import find_namespace_packages, setup

GOLDENS = "mpi_runner.goldens.data"

setup(
    packages=[*find_namespace_packages(include=["kda_engine*", "kernels_cu*", "mpi_runner*"]), GOLDENS],
    package_dir={GOLDENS: "data"},
)
