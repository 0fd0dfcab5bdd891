"""Transitions: how a stretch of tokens maps the state before it to the state after it.

    state after = transition * state before + update

A transition is a matrix with K rows and columns for each head, and the update is the state after the stretch if the
state before it is 0. The shape of a transition is its form, beside a state or an update [.., K, V]:

    diagonal   [.., K], or [.., 1] for the same number in all rows    gated linear attention
    dense      [.., K, K]                                             a delta rule

A `Summary` is a transition and an update. `compose` is associative, so whatever splits a sequence may join the
summaries of its pieces in any grouping. Products of dense transitions honour `torch.set_float32_matmul_precision`.

K, V key and value width
"""

from __future__ import annotations

import itertools

import torch

Summary = tuple[torch.Tensor, torch.Tensor]
"""The transition and the update of a stretch of tokens."""


def is_dense(transition: torch.Tensor, state: torch.Tensor) -> bool:
    """Returns whether a transition is dense, for states with as many dimensions as `state` [.., K, V]."""
    return transition.ndim == state.ndim


def apply(
    transition: torch.Tensor, state: torch.Tensor, update: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns transition * state + update [.., K, V], the state after a stretch of tokens.

    Args:
        state: the state before the stretch [.., K, V]. Dimensions of size 1 are broadcast, as in PyTorch's sums.
        out: memory for the result, which may be `state` or `update`; by default it is allocated.
    """
    if is_dense(transition, state):
        return torch.add(update, transition @ state, out=out)
    return torch.addcmul(update, transition[..., None], state, out=out)


def compose(later: Summary, earlier: Summary) -> Summary:
    """Returns the summary of two consecutive stretches."""
    transition, update = later
    product = transition @ earlier[0] if is_dense(transition, update) else transition * earlier[0]
    return product, apply(transition, earlier[1], update)


def prefix_products(transitions: torch.Tensor, dense: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the transition from the first of n consecutive stretches to each one, and that of all stretches.

    Args:
        transitions: [M, n, ..], in order.

    Returns:
        The products of the transitions before each one [M, n, ..], and of all of them [M, ..].
    """
    if dense:
        products = torch.stack(list(itertools.accumulate(transitions.unbind(1), lambda before, x: x @ before)), 1)
        neutral = torch.eye(transitions.shape[-1], dtype=transitions.dtype, device=transitions.device)
        neutral = neutral.expand_as(transitions[:, :1])
    else:
        products, neutral = transitions.cumprod(1), torch.ones_like(transitions[:, :1])
    return torch.cat([neutral, products[:, :-1]], 1), products[:, -1]
