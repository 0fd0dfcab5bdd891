"""Predicts the seconds of softmax attention; ../cost.py explains how the time of a call is counted. Constants:

launch, host   seconds between the starts of two kernels, and seconds of the host for a call
bandwidth      bytes a second
rate           multiplications of 16-bit numbers a second
float32        time of a float32 multiplication, relative to a 16-bit one
step           seconds of a block for 64 keys; in a backward, for 64 rows or keys
start          seconds of a multiprocessor between two blocks of 128 queries
merge          elements of outputs that are merged from splits in a second
"""

from __future__ import annotations

import math

import torch

from gla_core.dispatch.backend import Constants, OpCall
from gla_triton_kernels.cost import gpu_of_constants, in_all
from gla_triton_kernels.softmax_attention.plan import OWN_GRADIENTS, gradient_kernel, is_causal, plan_splits

QUERIES, KEYS = 128, 64
"""The queries and keys of the block for which `start` and `step` are measured; the tiles of a kernel may differ."""


def one_pass(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a call in which one program attends to all keys.

    It is the longest of three times: of the last block of queries, which attends to all keys; of arithmetic; and of
    loads of k and v.
    """
    B, Tq, Tk, H, Hq = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq"))
    blocks = B * H * math.ceil(Tq * (Hq / max(H, 1)) / QUERIES)
    all_keys = math.ceil(Tk / KEYS) * c["step"] * _slower(call, c)
    arithmetic = blocks / c["multiprocessors"] * c["start"] + _products(call) / c["rate"] * _slower(call, c)
    return in_all(call, c["launch"] + max(all_keys, arithmetic, _bytes(call) / c["bandwidth"]), c["host"])


def splits(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a call with keys in splits.

    This is the longer of two times, spread over the device: of arithmetic, and of loads of k and v. The time to merge
    splits is added.
    """
    B, Tq, Hq, V = (call.dims[name] for name in ("B", "Tq", "Hq", "V"))
    work = max(_products(call) / c["rate"] * _slower(call, c), _bytes(call) / c["bandwidth"])
    merged = plan_splits(call, gpu_of_constants(c)).split is not None
    merging = c["launch"] + B * Tq * Hq * V / c["merge"] if merged else 0
    return in_all(call, c["launch"] + work + merging, c["host"])


def gradients(call: OpCall, c: Constants) -> float:
    """Returns the seconds of a backward.

    It is the longest of three times: of the program that goes through all rows or all keys; of arithmetic; and of
    loads and stores. Our own kernels compute two of five products twice.
    """
    B, Tq, Tk, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq", "K", "V"))
    twice = gradient_kernel(call, gpu_of_constants(c)) is OWN_GRADIENTS
    products = (4 * K + 3 * V) if twice else (3 * K + 2 * V)
    chain = math.ceil(max(Tk, Tq * (Hq / max(H, 1))) / KEYS) * c["step"]
    arithmetic = B * Hq * Tq * _mean_keys(call) * products / c["rate"]
    moved = 2 * B * (Hq * Tq + H * Tk) * (K + V) * call.dtype.itemsize / c["bandwidth"]
    work = max(chain * _slower(call, c), arithmetic * _slower(call, c), moved)
    return in_all(call, 3 * c["launch"] + work, c["host"])


def _slower(call: OpCall, c: Constants) -> float:
    return c["float32"] if call.dtype == torch.float32 else 1


def _products(call: OpCall) -> float:
    """Returns the number of multiplications; a matrix product has at least 16 rows."""
    B, Tq, H, Hq, K, V = (call.dims[name] for name in ("B", "Tq", "H", "Hq", "K", "V"))
    return B * H * max(16, Tq * (Hq / max(H, 1))) * _mean_keys(call) * (K + V)


def _mean_keys(call: OpCall) -> float:
    """Returns the mean number of keys to which a query attends."""
    Tq, Tk = call.dims["Tq"], call.dims["Tk"]
    return Tk - min(Tq, Tk) / 2 if is_causal(call) else Tk


def _bytes(call: OpCall) -> int:
    """Returns the number of bytes of k and v."""
    B, Tk, H, K, V = (call.dims[name] for name in ("B", "Tk", "H", "K", "V"))
    return B * H * Tk * (K + V) * call.dtype.itemsize
