"""Kernels and helpers that the kernels of every generation use."""
