"""Computes the state after each of n segments of gated linear attention, in a logarithmic number of steps.

A segment is a pair (D, S): the product D of its gates, and its state S from a zero initial state. Two consecutive
segments join to

    (D2, S2) after (D1, S1)  =  (D1 * D2, diag(D2) S1 + S2)

This rule is associative, so neighbours can be joined in any order. In an up-sweep, for d = 1, 2, 4 .., the last segment
of every block of 2d segments joins the block of d segments to its left. In a down-sweep, the remaining segments join
the block to their left, which is then complete. There are 2 n joins in 2 log2 n steps, and a step computes all its
joins in one operation.

n segments   K, V key and value width   D keys of a decay: K, or 1 if all keys share it

Source: Brent and Kung, "A Regular Layout for Parallel Adders" (IEEE Transactions on Computers, 1982).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scan_states(decay: Tensor, state: Tensor, opens: Tensor | None = None) -> None:
    """Replaces the state of each segment by the state of all segments up to and including it, in place.

    Args:
        decay: products of gates [n, ..., D], overwritten.
        state: states [n, ..., K, V], replaced in place.
        opens: [n], whether a segment begins a sequence; None if only the first segment does. Such a segment does not
            depend on earlier segments, even if they contain infinities or NaN.
    """
    n, opens = len(state), None if opens is None else opens.clone()
    distances = [1 << level for level in range((n - 1).bit_length())]  # 1, 2, 4 .. below n
    for d in distances:
        left, right = slice(d - 1, n - d, 2 * d), slice(2 * d - 1, n, 2 * d)
        _join(state[left], decay[right], state[right], None if opens is None else opens[right])
        decay[right] *= decay[left]
        if opens is not None:
            opens[right] |= opens[left]
    for d in reversed(distances):
        left, right = slice(2 * d - 1, n - d, 2 * d), slice(3 * d - 1, n, 2 * d)
        _join(state[left], decay[right], state[right], None if opens is None else opens[right])


def _join(before: Tensor, decay: Tensor, state: Tensor, opens: Tensor | None) -> None:
    """Adds `before` [.., K, V], decayed by `decay` [.., D], to `state` [.., K, V], except where `opens` is set."""
    if opens is None:
        state.addcmul_(decay[..., None], before)
    else:
        joined = torch.addcmul(state, decay[..., None], before)
        torch.where(opens.reshape(-1, *[1] * (state.ndim - 1)), state, joined, out=state)
