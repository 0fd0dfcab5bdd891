"""Computes softmax attention over splits of the keys: computes each split independently, and merges the splits.

    each split      s = scale * q k^T      m = rowmax s      z = rowsum exp(s - m)      o = exp(s - m) v
    all splits      m' = max m             w = exp(m - m')    z' = sum w z              o' = sum w o / z'
                    lse = m' + log z'

The rule for merging two splits is associative; here it is applied to all splits at once.

B batch   Tq, Tk queries and keys   H key/value heads   G query heads per key/value head   K, V key and value width
M = C*G rows of the scores: C queries in a block with G heads each   p splits of up to SPLIT keys

Source: Dao et al., "FlashAttention" (arXiv 2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gla_core.dispatch.tensors import wide
from gla_parallel_scan.pytorch.blocks import blocks
from gla_parallel_scan.pytorch.online_softmax import finite

QUERIES = 256
SPLIT = 1024
"""The largest number of keys of a split."""
BLOCK = 2**19
"""The largest number of scores, or of elements of a split of the keys, that are computed at once, to stay in cache."""


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the op; see gla_core/ops/attention/softmax_attention.py."""
    B, Tq, Hq, K = q.shape
    _, Tk, H, V = v.shape
    dtype = wide(q.dtype)
    o, lse = v.new_empty(B, Tq, Hq, V), q.new_empty(B, Tq, Hq, dtype=dtype)
    queries, outputs, lses = (x.unflatten(2, (H, -1)) for x in (q, o, lse))  # [B, Tq, H, G, ...]
    head = min(Tk, SPLIT) * max(K, V, min(Tq, QUERIES) * (Hq // H))
    for batch, heads in blocks(B, H, head, BLOCK):
        for i in range(0, Tq, QUERIES):
            last = i + Tk - Tq if causal else Tk - 1  # the last key that query i sees
            block = (batch, slice(i, i + QUERIES), heads)
            keys = (batch, slice(max(0, min(Tk, last + QUERIES))), heads)  # the keys that any query of the block sees
            outputs[block], lses[block] = _attend(queries[block].to(dtype) * scale, k[keys], v[keys], last)
    return o, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Computes the attention of a block of queries.

    Args:
        q: [b, C, h, G, K], scaled. k: [b, j, h, K], the keys that any query sees. v: [b, j, h, V].
        last: the last key that the first query sees; each query sees one key more than the query before it.

    Returns:
        o [b, C, h, G, V] and lse [b, C, h, G].
    """
    b, C, h, G, _ = q.shape
    if k.shape[1] == 0:
        return q.new_full((b, C, h, G, v.shape[3]), torch.nan), q.new_full((b, C, h, G), -torch.inf)
    rows = _heads_first(q, q.dtype).flatten(1, 2)  # [b*h, M, K]
    limit = last + torch.arange(C * G, device=q.device)[:, None] // G  # [M, 1], the last key that a row sees
    splits = []
    for start in range(0, k.shape[1], SPLIT):
        keys = slice(start, start + SPLIT)
        s = rows @ _heads_first(k[:, keys], q.dtype).mT  # [b*h, M, c]
        stop = start + s.shape[2]
        if stop - 1 > last:
            s.masked_fill_(torch.arange(start, stop, device=q.device) > limit, -torch.inf)
        splits.append(_split(s, _heads_first(v[:, keys], q.dtype)))
    o, lse = (x.view(b, h, C, G, -1).transpose(1, 2) for x in _merge(splits))
    return o, lse.squeeze(-1)


def _split(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes m, z [.., M, 1] and o [.., M, V] of a split, from scores s [.., M, c], overwritten, and v [.., c, V]."""
    m = s.amax(-1, keepdim=True)
    s.sub_(finite(m)).exp_()
    return m, s.sum(-1, keepdim=True), s @ v


def _merge(splits: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges m, z and o of all splits into o [.., V] and lse [.., 1]."""
    m, z, o = (torch.stack(x) for x in zip(*splits, strict=True))  # [p, .., 1], [p, .., 1], [p, .., V]
    largest = m.amax(0)
    w = torch.exp(m - finite(largest))
    z = (w * z).sum(0)
    return (w * o).sum(0) / z, largest + z.log()  # 0 / 0 = NaN for a row that attends to no key


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [b, j, h, ...] as [b*h, j, ...] in `dtype`."""
    return x.transpose(1, 2).to(dtype).flatten(0, 1)
