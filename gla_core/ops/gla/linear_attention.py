"""Computes linear attention with a feature map phi, and optionally a normaliser, as gated linear attention.

    S_t = S_{t-1} + phi(k_t)^T v_t        z_t = z_{t-1} + phi(k_t)        o_t = phi(q_t) S_t / (phi(q_t) z_t)

With a gate, S_{t-1} and z_{t-1} decay before they are added to, as the state of `chunk_gla` does. z is computed as one
more column of S: each v_t gets one more entry, which is always 1.

Source: Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_core.ops import checks
from gla_core.ops._torch_op import exportable
from gla_core.ops.deprecated import backend_by_position
from gla_core.ops.gla.chunk_gla import chunk_gla


def elu_plus_one(x: Tensor) -> Tensor:
    """Computes elu(x) + 1, the positive feature map of arXiv 2006.16236."""
    return torch.nn.functional.elu(x) + 1


@exportable
class LinearAttention(NamedTuple):
    """Holds the results of `linear_attention`.

    Attributes:
        o: outputs [B, T, Hq, V], dtype of v.
        state: the final state, shaped like initial_state; None unless asked for. Its type is `Tensor | Any`, as in
            `ChunkGla`.
    """

    o: Tensor
    state: Tensor | Any


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Callable[[Tensor], Tensor] | None = elu_plus_one,
    normalize: bool = True,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *rest: str | None,
    backend: str | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    g: Tensor | None = None,
    gate: str | None = None,
    gate_normalizer: int = 16,
) -> LinearAttention:
    """Computes causal linear attention, differentiable.

    Args:
        q: queries [B, T, Hq, K], float64, float32, float16 or bfloat16.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, H, V], dtype of q.
        feature_map: phi, applied to q and k; it may change their width. None leaves them unchanged.
        normalize: whether to divide by phi(q_t) z_t. If this is 0, the result is not finite; phi > 0 avoids that.
        scale: factor of the output; it has no effect if normalize is True.
        initial_state: the state before the first token [N, H, K, V]; with normalize [N, H, K, V + 1], where the last
            column is z. None means 0.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets of packed sequences [N+1], as in `chunk_gla`; B is 1.
        backend: a request such as "reference"; see `use_backend`.
        max_seqlen: a bound on the lengths of packed sequences, as in `chunk_gla`.
        state_v_first: whether initial_state and the final state are [N, H, V, K], with normalize [N, H, V + 1, K], as
            in `chunk_gla`.
        g: the natural logarithm of a forget gate of S and z, of one of the shapes that `chunk_gla` takes, where K is
            the width of phi(k). None means no decay.
        gate: None, or "logsigmoid" if g holds logits, as in `chunk_gla`.
        gate_normalizer: the whole number by which log sigma of the logits is divided.

    Returns:
        `o` [B, T, Hq, V] with the dtype of v, and `state`, the final state, shaped like initial_state (None unless
        asked for).

    Raises:
        ValueError, TypeError, NoBackendError, UnknownBackendError, NotImplementedError: as in `chunk_gla`.

    Example:
        >>> o, _ = gla.linear_attention(q, k, v)
        >>> relu = torch.nn.functional.relu
        >>> o, _ = gla.linear_attention(q, k, v, relu, normalize=False)
    """
    if rest:
        backend = backend_by_position("linear_attention", rest, backend)
    if feature_map is not None:
        q, k = feature_map(q), feature_map(k)
    sequences = (initial_state, output_final_state, cu_seqlens)
    options: Any = {"backend": backend, "max_seqlen": max_seqlen, "state_v_first": state_v_first}
    options |= {"gate": gate, "gate_normalizer": gate_normalizer}
    if not normalize:
        return LinearAttention(*chunk_gla(q, k, v, g, scale, *sequences, **options))
    _check(q, v, initial_state, cu_seqlens is not None, state_v_first)
    v = torch.cat([v, v.new_ones(()).expand(*v.shape[:-1], 1)], dim=-1)
    o, state = chunk_gla(q, k, v, g, 1.0, *sequences, **options)
    z = o[..., -1:]
    if cu_seqlens is not None:  # rows that belong to no sequence stay 0
        tokens = torch.arange(q.shape[1], device=q.device)
        in_sequences = (cu_seqlens[0] <= tokens) & (tokens < cu_seqlens[-1])  # [T]
        z = torch.where(in_sequences[:, None, None], z, 1)
    return LinearAttention(o[..., :-1] / z, state)


def _check(q: Tensor, v: Tensor, initial_state: Tensor | None, packed: bool, state_v_first: bool) -> None:
    """Checks v and the state, so that errors show their shapes here; chunk_gla gets one more column of values."""
    sizes: dict[str, Any] = {}
    checks.tensor("q", q, "B T Hq K", sizes)
    checks.tensor("v", v, "B T Hv V", sizes)
    if initial_state is not None:
        sizes = {"Hv": sizes["Hv"], "K": sizes["K"], "V+1": sizes["V"] + 1} | ({} if packed else {"N": sizes["B"]})
        checks.tensor("initial_state", initial_state, "N Hv V+1 K" if state_v_first else "N Hv K V+1", sizes)
