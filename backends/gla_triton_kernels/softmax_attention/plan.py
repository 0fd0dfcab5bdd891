"""Plans softmax attention: chooses the kernel, launch parameters and splits. Imports no Triton.

launches.py runs a plan, and cost.py predicts the time of the same plan. Launch parameters were chosen by measurements
on an H200.

B batch   Tq, Tk queries and keys   H key/value heads   Hq query heads   K, V key and value width
BR rows of queries of a program   BT keys of a block   BK, BV key and value width, rounded up
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gla_core.dispatch.backend import OpCall, Reason
from gla_core.dispatch.tensors import ceil_div
from gla_triton_kernels.softmax_attention.kernel import GradientPlan, Kernel, Plan
from gla_triton_runtime.architecture import Architecture, Gpu, gpu_of_call
from gla_triton_runtime.sizes import power_of_two
from gla_triton_runtime.tma import addressable


def is_causal(call: OpCall) -> bool:
    """Returns whether attention is causal: the argument `causal`, or if there is none, whether Tq is more than one."""
    return call.scalars.get("causal", call.dims["Tq"] > 1)


# ---- all keys by one program

# Each width has BR, BT and a number of warps. Products of 16-bit numbers use large blocks, to fill the tensor cores.
# Products of float32 at full precision are computed without tensor cores and fully unrolled, so their blocks are small.
TILES_16_BIT = {64: (64, 128, 4), 128: (128, 64, 4), 256: (128, 64, 8), 512: (64, 32, 8)}
TILES_TF32 = {64: (64, 64, 4), 128: (64, 32, 4), 256: (16, 16, 8), 512: (16, 16, 8)}
TILES_FLOAT32 = {64: (32, 32, 4), 128: (32, 16, 8), 256: (16, 16, 8), 512: (16, 16, 8)}
LEAST_TILE = 16
"""The least number of rows, and of keys, of a tile."""
WGMMA_ROWS = 64
"""Rows of a warpgroup: wgmma multiplies 64 rows. With up to 64 queries, one of two warpgroups would be idle."""


def _load_general() -> Callable[..., Any]:
    from gla_triton_kernels.softmax_attention.forward import launch_attention

    return launch_attention


def _load_sm90() -> Callable[..., Any]:
    from gla_triton_kernels.softmax_attention.forward_sm90 import launch_attention

    return launch_attention


def _sm90_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    Tq, K, V = (call.dims[name] for name in ("Tq", "K", "V"))
    if not gpu.facts.has_wgmma:
        return f"needs Hopper (compute capability 9.0); the GPU is of the kind {gpu.facts.known_as}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    if not are_addressable(call, "qkv") or V % 8:  # rows of o of 16 bytes
        return "needs tensors whose addresses and strides are multiples of 16 bytes"
    if Tq <= WGMMA_ROWS:
        return f"computes more than {WGMMA_ROWS} queries; there are {Tq}"
    if not 64 < max(K, V) <= 256:
        return f"computes heads of 72 to 256; K is {K} and V is {V}"
    return None


def are_addressable(call: OpCall, names: Iterable[str]) -> bool:
    """Returns whether TMA can address the tensors of these names, [B, T, H, width].

    A tensor with an unknown layout counts as addressable.
    """
    return all(addressable(call.layouts[name]) for name in names if name in call.layouts)


GENERAL = Kernel("forward", _load_general, lambda call, gpu: None)
SM90 = Kernel("forward_sm90", _load_sm90, _sm90_refusal)


def plan_one_pass(call: OpCall, gpu: Gpu) -> Plan:
    """Returns a plan in which one program attends to all keys."""
    if SM90.refusal(call, gpu) is None:
        return _sm90(call.dims["K"], call.dims["V"])
    return _general(call, gpu)


def explained(plan: Callable[[OpCall, Gpu], Plan]) -> Callable[[OpCall], list[str]]:
    """Returns a function that names the kernel of a call, and gives the reason if the kernel for SM90 refuses it."""

    def explain(call: OpCall) -> list[str]:
        gpu = gpu_of_call(call)
        chosen, reason = plan(call, gpu), SM90.refusal(call, gpu)
        splits = chosen.splits(call.dims["Tk"])
        lines = [f"kernel {chosen.kernel.name}" + (f", keys in {splits} splits" if splits > 1 else "")]
        return lines if reason is None else [*lines, f"not {SM90.name}: {reason}"]

    return explain


def _sm90(K: int, V: int) -> Plan:
    BK, BV = (64 if width <= 64 else 128 if width <= 128 else 256 for width in (K, V))
    BK = max(BK, BV)  # o is written through the tiles of q
    BT = 128 if BK <= 128 else 64
    return Plan(kernel=SM90, BR=WGMMA_ROWS, BT=BT, BK=BK, BV=BV, warps=4, tma=True, registers=168)


def _general(call: OpCall, gpu: Gpu) -> Plan:
    Tq, H, Hq, K, V = (call.dims[name] for name in ("Tq", "H", "Hq", "K", "V"))
    rows, width, exact = Tq * (Hq // max(H, 1)), power_of_two(max(K, V), 64), _is_exact(call, gpu)
    tiles = TILES_FLOAT32 if exact else TILES_TF32 if call.dtype == torch.float32 else TILES_16_BIT
    BR, BT, warps = tiles[width]
    BR, BT = _in_shared_memory(BR, BT, width * call.dtype.itemsize, gpu)
    if rows < BR:
        BR, warps = power_of_two(rows, 16), min(warps, 4)
    tma = gpu.facts.has_tma and call.dtype != torch.float32 and are_addressable(call, "kv")
    # Triton 3.6 on Hopper miscompiles blocks of pointers with V up to 32 and K above 32, so BK equals BV there.
    BK, BV = (power_of_two(K, 16), power_of_two(V, 16)) if tma else (width, width)
    return Plan(kernel=GENERAL, BR=BR, BT=BT, BK=BK, BV=BV, warps=warps, tma=tma, exact=exact or not gpu.facts.has_tf32)


def _is_exact(call: OpCall, gpu: Gpu) -> bool:
    """Returns whether a call multiplies float32 as float32."""
    in_tf32 = gpu.facts.has_tf32 and call.float32_matmul_precision != "highest"
    return call.dtype == torch.float32 and not in_tf32


def _in_shared_memory(BR: int, BT: int, row: int, gpu: Gpu) -> tuple[int, int]:
    """Returns BR and BT, halved until a tile of queries and two blocks of keys and of values fit into shared memory.

    Args:
        row: bytes of a row of a tile.
    """
    while (BR + 2 * 2 * BT) * row > gpu.facts.shared_memory and max(BR, BT) > LEAST_TILE:
        BR, BT = (BR // 2, BT) if max(2 * BT, LEAST_TILE) < BR or BT == LEAST_TILE else (BR, BT // 2)
    return BR, BT


# ---- keys in splits

PROGRAMS = 4
"""The number of programs per multiprocessor: two waves of two programs."""
FEW_ROWS = 16
"""The number of rows of a program up to which loads of keys limit it: it has one more pipeline stage, and a single wave
of programs is best."""
PROGRAMS_OF_FEW_ROWS = 3
"""The number of programs with up to `FEW_ROWS` rows that a multiprocessor runs at once."""
FEWEST_BLOCKS = 4
"""The least number of blocks of keys of a split. A program then writes fewer bytes of o than it reads of keys."""


def plan_splits(call: OpCall, gpu: Gpu) -> Plan:
    """Returns a plan with enough splits of the keys to fill the device with programs.

    If one split is enough, keys are not split. Only the general kernel supports splits; a call without splits may use
    the kernel for SM90.
    """
    B, Tq, Tk, H, Hq = (call.dims[name] for name in ("B", "Tq", "Tk", "H", "Hq"))
    plan, programs = _general(call, gpu), PROGRAMS
    if plan.BR <= FEW_ROWS and call.dtype != torch.float32:
        plan, programs = replace(plan, stages=3), PROGRAMS_OF_FEW_ROWS
    tiles = ceil_div(Tq * (Hq // max(H, 1)), plan.BR) * B * H
    seen = max(1, Tk - min(Tq, Tk) // 2 if is_causal(call) else Tk)  # mean number of keys to which a row attends
    keys = tiles * seen / (programs * gpu.multiprocessors)
    split = max(FEWEST_BLOCKS, ceil_div(int(keys), plan.BT)) * plan.BT
    if split < Tk:
        return replace(plan, split=split)
    whole = plan_one_pass(call, gpu)
    return whole if whole.kernel is SM90 else plan


# ---- gradients

# Each width has the numbers of keys, or rows, that a program holds and passes through, and numbers of warps and stages.
GRADIENT_TILES_16_BIT = {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 1)}
GRADIENT_TILES_FLOAT32 = {64: (32, 32, 4, 2), 128: (32, 16, 8, 2), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)}


def plan_gradients(call: OpCall, gpu: Gpu) -> GradientPlan:
    """Returns the launch parameters of a backward by our own kernels."""
    K, V = call.dims["K"], call.dims["V"]
    width, size = power_of_two(max(K, V), 64), call.dtype.itemsize
    tiles = GRADIENT_TILES_FLOAT32 if call.dtype == torch.float32 else GRADIENT_TILES_16_BIT
    held, passed, warps, stages = tiles[width]
    # A quarter more than tiles of q and do, and of k and v: weights p and ds pass through shared memory too.
    while 2.5 * (held + stages * passed) * width * size > gpu.facts.shared_memory and (held, stages) != (LEAST_TILE, 1):
        held, stages = (held, stages - 1) if stages > 1 else (held // 2, stages)
    exact = _is_exact(call, gpu) or not gpu.facts.has_tf32
    # Blocks of pointers have one width; see `_general`.
    return GradientPlan(held=held, passed=passed, BK=width, BV=width, warps=warps, stages=stages, exact=exact)


def _load_gradients() -> Callable[..., Any]:
    from gla_triton_kernels.softmax_attention.launches import prepare_gradients

    return prepare_gradients


def _load_cudnn() -> Callable[..., Any]:
    from gla_triton_kernels.softmax_attention import library

    return partial(library.prepare, library.cudnn)


def _load_flash() -> Callable[..., Any]:
    from gla_triton_kernels.softmax_attention import library

    return partial(library.prepare, library.flash)


def _library_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    """Returns the reason why no kernel of a library computes the gradients of a call, or None."""
    Tq, Tk, K, V = (call.dims[name] for name in ("Tq", "Tk", "K", "V"))
    if gpu.architecture in (Architecture.INTERPRETED, Architecture.AMD):
        return f"needs a GPU of NVIDIA; the GPU is of the kind {gpu.facts.known_as}"
    if call.deterministic:
        return "is not deterministic; torch.use_deterministic_algorithms is on"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16; q is {str(call.dtype).removeprefix('torch.')}"
    if call.dtype == torch.float16 and "dlse" in call.given:
        return "takes a gradient of lse in bfloat16 only"
    if K % 8 or V % 8 or not are_addressable(call, ("q", "k", "v", "o", "do")):
        return "needs tensors whose addresses and strides are multiples of 16 bytes"
    if is_causal(call) and Tq != Tk:
        return f"computes causal attention of as many queries as keys; there are {Tq} and {Tk}"
    return None


def _cudnn_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    K, V, Tk = (call.dims[name] for name in ("K", "V", "Tk"))
    reason = _library_refusal(call, gpu)
    if reason is not None:
        return reason
    if gpu.architecture not in (Architecture.SM90, Architecture.SM100):
        return f"is faster on Hopper and Blackwell only; the GPU is of the kind {gpu.facts.known_as}"
    if max(K, V) > 128 or Tk == 1:
        return f"computes heads of up to 128, and more than one key; K is {K}, V is {V}, and there are {Tk} keys"
    if call.assumed is None and (torch.backends.cudnn.version() or 0) <= LEAST_CUDNN:
        return f"needs cuDNN after {LEAST_CUDNN}; PyTorch has {torch.backends.cudnn.version()}"
    return None


def _flash_refusal(call: OpCall, gpu: Gpu) -> Reason | None:
    K, V = call.dims["K"], call.dims["V"]
    reason = _library_refusal(call, gpu)
    if reason is not None:
        return reason
    widest = 256 if gpu.facts.shared_memory > FEW_SHARED else 192
    if K != V or widest < K:
        return f"computes heads of one width, up to {widest}; K is {K} and V is {V}"
    if call.assumed is None and not torch.backends.cuda.is_flash_attention_available():
        return "needs a PyTorch that was built with FlashAttention"
    return None


LEAST_CUDNN = 91500
"""PyTorch prefers cuDNN to FlashAttention on Hopper after this version."""
FEW_SHARED = 99 * 1024
"""The shared memory, in bytes, with which FlashAttention's backward computes no heads of more than 192."""
OWN_GRADIENTS = Kernel("backward", _load_gradients, lambda call, gpu: None)
GRADIENT_KERNELS = (
    Kernel("cudnn", _load_cudnn, _cudnn_refusal),
    Kernel("flash", _load_flash, _flash_refusal),
    OWN_GRADIENTS,
)
"""The kernels that compute gradients, best first."""


def gradient_kernel(call: OpCall, gpu: Gpu) -> Kernel:
    """Returns the first kernel that computes the gradients of a call."""
    return next(kernel for kernel in GRADIENT_KERNELS if kernel.refusal(call, gpu) is None)


def explain_gradients(call: OpCall) -> list[str]:
    """Returns lines that name the kernel of a backward, and give the reasons why better kernels refuse it."""
    gpu = gpu_of_call(call)
    chosen = gradient_kernel(call, gpu)
    better = GRADIENT_KERNELS[: GRADIENT_KERNELS.index(chosen)]
    return [f"kernel {chosen.name}", *(f"not {kernel.name}: {kernel.refusal(call, gpu)}" for kernel in better)]
