"""Which HDF5 this is."""

import h5py


def hdf5_version():
    """{"h5py": version, "hdf5": version of the C library, "parallel": whether it was built with MPI}."""
    return {"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}
