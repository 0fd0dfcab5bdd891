"""The host side of every kernel: launches, their replay and graphs, TMA, the facts of a GPU; and shared arithmetic.

It knows no op. A package with Triton kernels of its own may launch them by it.
"""
