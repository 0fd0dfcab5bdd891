"""Triton code that `gla_triton_fused` and `gla_parallel_scan` are both made of: no backend, but what two of them share.

Kernels walk a sequence from the state that enters it, so they serve whole sequences and segments of them alike. The
modules import triton, and are imported when an op is first called.
"""
