"""Kernels for Hopper (SM90), with specialised warps."""


def warpgroup_columns(K: int) -> int:
    """Returns the most columns of v of a state warpgroup with K keys. Its registers hold K rows of them."""
    return 64 if K <= 256 else 32 if K <= 512 else 16
