"""Helpers that ops and backends share: wide dtypes, gates from logits, and memory for states and checkpoints.

B batch   T tokens   N sequences   H key heads   Hv value heads   K, V key and value width   n rows of checkpoints
"""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states and sums for inputs of this dtype: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up; b is positive."""
    return -(-a // b)


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension of x [.., D], D at least 1, with the dtype of x.

    The first half is added to the second, which gets a 0 if D is odd, until one number is left. So a row has the same
    bits whatever rows are beside it. The order of `torch.sum` may depend on the number of rows.
    """
    while (D := x.shape[-1]) > 1:
        first, second = torch.nn.functional.pad(x, (0, 1)).chunk(2, -1) if D % 2 else x.chunk(2, -1)
        x = first + second
    return x.squeeze(-1)


def sigmoid(x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Returns sigma(x). With `exact`, a number has the same bits wherever it is in x.

    On a CPU PyTorch computes the last numbers of a tensor, which fill no vector of the processor, by other code in its
    sigmoid, softplus and silu. It does not in logsigmoid and exp.
    """
    return torch.nn.functional.logsigmoid(x).exp() if exact and x.is_cpu else torch.sigmoid(x)


def softplus(x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Returns log(1 + e^x); `exact` is as in `sigmoid`."""
    functional = torch.nn.functional
    return -functional.logsigmoid(-x) if exact and x.is_cpu else functional.softplus(x)


def silu(x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Returns x sigma(x); `exact` is as in `sigmoid`."""
    return x * sigmoid(x, exact) if exact and x.is_cpu else torch.nn.functional.silu(x)


def log_gates(g: torch.Tensor, gate_normalizer: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns log gates in `dtype`: g itself, or log sigma(g) / gate_normalizer if g holds logits."""
    g = g.to(dtype)
    return g if gate_normalizer is None else torch.nn.functional.logsigmoid(g) / gate_normalizer


def decayed(state: torch.Tensor, g: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns states [B, Hv, K, V] times exp(g) in `dtype`, for the log gates of a token: [Hv], [B, Hv] or [B, Hv, K],
    or None for no decay. The result has memory of its own.
    """
    if g is None:
        return state.to(dtype, copy=True)
    alpha = g.to(dtype).exp()
    return (alpha[..., None] if g.ndim == 3 else alpha[..., None, None]) * state.to(dtype)


def gradient_of_logits(dg: torch.Tensor, g: torch.Tensor, gate_normalizer: int | None) -> torch.Tensor:
    """Returns the gradient of g from that of the log gates, dg; see `log_gates`.

    It is 0 where dg is 0, because a logit that belongs to no sequence may be NaN.
    """
    if gate_normalizer is None:
        return dg
    return torch.where(dg == 0, 0, dg * torch.sigmoid(-g.to(dg.dtype)) / gate_normalizer)


def number_of_sequences(B: int, cu_seqlens: torch.Tensor | None) -> int:
    """Returns N: the number of rows of a batch, or of the packed sequences that `cu_seqlens` [N+1] delimits."""
    return B if cu_seqlens is None else len(cu_seqlens) - 1


def swapped(x: torch.Tensor) -> bool:
    """Returns whether the last two dimensions of a tensor [..., K, V] are swapped in memory: K is contiguous."""
    return x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and not x.is_contiguous()


def new_state(state: torch.Tensor) -> torch.Tensor:
    """Returns dense memory for the state [P, H, K, V] after a step, with K and V swapped if they are in `state`."""
    if swapped(state):
        return torch.empty_like(state.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def checkpoint_rows(T: int, N: int, every: int, packed: bool) -> int:
    """Returns n, the number of checkpoint rows, one per `every` of T tokens: in a batch row, or N packed sequences."""
    return N + T // every if packed else ceil_div(T, every)


def checkpoint_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of checkpoints for this dtype of q."""
    return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def checkpoint_shape(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, every: int
) -> tuple[int, int, int, int, int]:
    """Returns the shape [B, n, Hv, K, V] of the checkpoints of a forward."""
    B, T, Hv, V = v.shape
    n = checkpoint_rows(T, number_of_sequences(B, cu_seqlens), every, packed=cu_seqlens is not None)
    return B, n, Hv, k.shape[3], V


def new_checkpoints(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, every: int) -> torch.Tensor:
    """Returns memory for the checkpoints [B, n, Hv, K, V] of a forward. For packed sequences it is filled with
    zeros, because they leave some rows unwritten.
    """
    allocate = v.new_empty if cu_seqlens is None else v.new_zeros
    return allocate(checkpoint_shape(k, v, cu_seqlens, every), dtype=checkpoint_dtype(k.dtype))
