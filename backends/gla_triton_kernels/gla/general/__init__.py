"""Kernels for every GPU, from compute capability 8.0 on."""
