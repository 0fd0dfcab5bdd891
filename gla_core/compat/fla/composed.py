"""Functions of `fla.ops` that are computed as calls of GLA, with the same arguments and results.

    rwkv6      S_t = diag(exp(w_t)) S_{t-1} + k_t^T v_t     o_t = scale r_t (S_{t-1} + diag(u) k_t^T v_t)
    lightnet   z_t = log(exp(z_{t-1}) + exp(k_t))           GLA with keys exp(k_t - z_t) and gates z_{t-1} - z_t

rwkv6 reads the state before the token: it is GLA of the keys, values and gates of the token before, and the bonus
(r_t . u k_t) v_t. One token without gradients is a decoding step with a bonus.

Dimensions, dtypes and errors are as in `ops.chunk_gla`. Gates are natural logarithms.
Source: flash-linear-attention 0.6.0, fla/ops; Peng et al., "Eagle and Finch" (arXiv 2404.05892); Qin et al., "You Only
Scan Once" (arXiv 2405.21022).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_core.compat.fla.ops import from_last_to_first, is_one_token, no_more, one_token, recurrent
from gla_core.dispatch.tensors import number_of_sequences, wide
from gla_core.ops.fused import fused
from gla_core.ops.gla import recurrent_gla_step as _recurrent_gla_step

PART = 64
"""Rows whose sums one thread of a GPU adds."""
Pair = tuple[Tensor | None, Tensor | None]


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the attention of RWKV-6, as `fla.ops.rwkv6.chunk_rwkv6` does.

    Args:
        r: receptances, which are the queries [B, T, H, K].
        w: natural logarithm of the forget gate [B, T, H, K], at most 0.
        u: the bonus of the current token [H, K].
        cu_seqlens_cpu: the same offsets on the CPU; not used.
        kwargs: chunk_size, which has no effect. Another argument raises TypeError.

    The other arguments, the results and the errors are as in `ops.chunk_gla`; states are [N, H, K, V].
    """
    no_more("chunk_rwkv6", kwargs)
    return fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunk_rwkv6`; `reverse` is as in `ops.fused_recurrent_gla`."""

    def run(r: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Any, offsets: Any) -> tuple[Tensor, Any]:
        rows = _Rows.of(r, offsets)
        r, k, v = (rows.cleared(x) for x in (r, k, v))
        keys, values, gates = fused(_rows_before, k, v, w, *rows)
        o, state = recurrent(r, keys, values, gates, scale, state, output_final_state, cu_seqlens=offsets)
        o = fused(_with_bonus, o, r, k, v, u, factor)
        return o, None if state is None else _after_last(state, k, v, w, rows)

    if is_one_token(r, cu_seqlens, k, v, w, u, initial_state):
        bonus = u if u.dtype == r.dtype else u.to(wide(r.dtype))
        rest = (scale, initial_state, output_final_state, False)
        return one_token(_recurrent_gla_step, (r, k, v, w), *rest, bonus=bonus)
    factor, u = r.shape[3] ** -0.5 if scale is None else scale, u.to(wide(r.dtype))
    call = from_last_to_first(run) if reverse else run
    return call(r, k, v, w, initial_state, cu_seqlens)


def _rows_before(
    k: Tensor, v: Tensor, w: Tensor, offsets: Tensor | None, sequence: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the keys, values and gates of the token before each token, 0 before the first; see `_Rows`."""
    rows = _Rows(offsets, sequence)
    return rows.before(k, 0), rows.before(v, 0), rows.before(w, 0)


def _with_bonus(o: Tensor, r: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> Tensor:
    """Returns o + scale (r . u k) v for each token and head, in the dtype of o."""
    return (o + (scale * r.to(u.dtype) * u * k).sum(-1, keepdim=True) * v).to(o.dtype)


def chunk_lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Pair]:
    """Computes the attention of LightNet, as `fla.ops.lightnet.chunk_lightnet` does.

    Args:
        k: logits of the keys [B, T, H, K].
        initial_state: a pair, either of which may be None: the state [N, H, K, V], or [N, H, V, K] with state_v_first,
            and the logarithm z of the sum of exp(k) [N, 1, H, K].

    The other arguments and the errors are as in `ops.chunk_gla`.

    Returns:
        o [B, T, H, V] and a pair: the final state (None unless output_final_state), and the last z [N, 1, H, K],
        float32 (float64 with float64 inputs), -inf for an empty sequence without an initial one.
    """
    state, z = (None, None) if initial_state is None else initial_state
    keys, gate, z = additive_gate(k, z, cu_seqlens)
    rest = (scale, state, output_final_state, False, state_v_first, cu_seqlens)
    o, state = recurrent(q, keys.to(k.dtype), v, gate, *rest)
    return o, (state, z)


fused_recurrent_lightnet = chunk_lightnet


def additive_gate(x: Tensor, z: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exp(x_t - z_t), z_{t-1} - z_t (0 if exp(z_{t-1}) is 0), and the last z [N, 1, H, K].

    They are a sigmoid and its logarithm, which loses no digits if x_t changes z little.
    """
    if cu_seqlens is None:
        return fused(_additive_gate, x, z)
    return _additive_gate(x, z, cu_seqlens)  # its number of steps depends on T, for which compiled code is not reused


def _additive_gate(x: Tensor, z: Tensor | None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `additive_gate`."""
    rows = _Rows.of(x, cu_seqlens)
    x = rows.cleared(x.to(wide(x.dtype)))
    N = number_of_sequences(len(x), cu_seqlens)
    z = x.new_full((N, 1, *x.shape[2:]), -torch.inf) if z is None else z.to(x.dtype)
    total = torch.logaddexp(rows.log_cumsum_exp(x), rows.spread(z))
    key, gate = fused(_key_and_gate, x, total, z, *rows)
    return key, gate, rows.last(total, z[:, 0])[:, None]


def _key_and_gate(
    x: Tensor, total: Tensor, z: Tensor, offsets: Tensor | None, sequence: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns exp(x_t - z_t), and z_{t-1} - z_t, of the sums z_t in `total`, of which z are the first ones."""
    before = _Rows(offsets, sequence).before(total, z)
    return torch.sigmoid(x - before), torch.where(before == -torch.inf, 0, F.logsigmoid(before - x))


def _after_last(state: Tensor, k: Tensor, v: Tensor, w: Tensor, rows: _Rows) -> Tensor:
    """Returns the states [N, H, K, V] after the last token of each sequence, from those before it."""
    k, v, w = (rows.last(x.to(state.dtype), 0) for x in (k, v, w))  # 0 leaves the state of an empty sequence
    return w.exp()[..., None] * state + k[..., None] * v[..., None, :]


class _Rows(NamedTuple):
    """Positions of the tokens in their sequences, for tensors [B, T, H, D].

    Attributes:
        offsets: the offsets of packed sequences [N+1], int64; None without packed sequences.
        sequence: the sequence of each token [T]; N for rows after the last offset.
    """

    offsets: Tensor | None = None
    sequence: Tensor | None = None

    @staticmethod
    def of(x: Tensor, cu_seqlens: Tensor | None) -> _Rows:
        """Returns the positions of the tokens of x."""
        if cu_seqlens is None:
            return _Rows()
        offsets, tokens = cu_seqlens.long(), torch.arange(x.shape[1], device=x.device)
        return _Rows(offsets, torch.searchsorted(offsets[1:], tokens, right=True))

    def before(self, x: Tensor, first: Tensor | float) -> Tensor:
        """Returns the row before each row within its sequence; before the first it is `first`, [N, 1, H, D] or 0."""
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        tokens = torch.arange(x.shape[1], device=x.device)
        if self.offsets is None or self.sequence is None:
            is_first = tokens == 0
        else:
            is_first = tokens == self.offsets[self.sequence]
        return torch.where(is_first[:, None, None], self.spread(first), shifted)

    def spread(self, x: Any) -> Any:
        """Returns for each row the value [N, 1, H, D] of its sequence; 0 for rows after the last offset."""
        if self.sequence is None or not isinstance(x, Tensor):
            return x
        return torch.cat([x[:, 0], x.new_zeros(1, *x.shape[2:])])[self.sequence][None]

    def last(self, x: Tensor, empty: Tensor | float) -> Tensor:
        """Returns the last row of each sequence [N, H, D], or `empty` if it has no rows."""
        if x.shape[1] == 0:
            return x.new_zeros(number_of_sequences(len(x), self.offsets), *x.shape[2:]) + empty
        if self.offsets is None:
            return x[:, -1]
        last = x[0, (self.offsets[1:] - 1).clamp(min=0)]
        return torch.where((self.offsets.diff() > 0)[:, None, None], last, empty)

    def cleared(self, x: Tensor) -> Tensor:
        """Returns x with zeros in the rows that belong to no sequence, so that these change no gradient."""
        if self.offsets is None:
            return x
        tokens = torch.arange(x.shape[1], device=x.device)
        return torch.where(((self.offsets[0] <= tokens) & (tokens < self.offsets[-1]))[:, None, None], x, 0)

    def log_cumsum_exp(self, x: Tensor) -> Tensor:
        """Returns the logarithm of the sum of exp(x) over the rows up to each row of its sequence.

        PyTorch adds the rows of a column one after the other, so parts of `PART` rows are more columns for a GPU. For
        packed sequences these are log2(T) steps, each of which doubles the number of rows in every sum.
        """
        if self.offsets is None or self.sequence is None:
            if (T := x.shape[1]) <= PART:
                return torch.logcumsumexp(x, 1)
            parts = F.pad(x, (0, 0, 0, 0, 0, -T % PART), value=-torch.inf).unflatten(1, (-1, PART))
            inside = torch.logcumsumexp(parts, 2)  # [B, n, PART, H, D]
            earlier = F.pad(torch.logcumsumexp(inside[:, :-1, -1], 1), (0, 0, 0, 0, 1, 0), value=-torch.inf)
            return torch.logaddexp(inside, earlier[:, :, None]).flatten(1, 2)[:, :T]
        place, reach = torch.arange(x.shape[1], device=x.device) - self.offsets[self.sequence], 1
        while reach < x.shape[1]:
            earlier = torch.cat([x[:, :reach], x[:, :-reach]], 1)
            x = torch.where((place >= reach)[:, None, None], torch.logaddexp(x, earlier), x)
            reach *= 2
        return x
