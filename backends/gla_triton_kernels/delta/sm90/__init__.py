"""Kernels of the delta rule for Hopper (SM90)."""
