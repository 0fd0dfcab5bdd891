"""Kernels and helpers that the kernels of every generation are composed with."""
