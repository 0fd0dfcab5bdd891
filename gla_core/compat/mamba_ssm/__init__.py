"""The functions by which mamba_ssm's Mamba-2 layers compute, with the same arguments, computed by `gla_core`.

Importing this package does not import mamba_ssm.
"""

from gla_core.compat.mamba_ssm.ops import mamba_chunk_scan_combined, selective_state_update

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]
