"""How problems are laid out for the kernels of each path, as tables on the device."""
