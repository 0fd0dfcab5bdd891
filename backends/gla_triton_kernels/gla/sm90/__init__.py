"""Kernels for Hopper (SM90), with specialised warps."""
