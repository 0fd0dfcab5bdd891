"""The kernels of the delta rule for every GPU."""
