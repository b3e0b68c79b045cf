"""HDF5 files: inputs, results, goldens. The only home of h5py; knows no engine and no MPI."""
