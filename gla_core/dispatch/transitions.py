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


def summaries_of_beginnings(summary: Summary) -> Summary:
    """Returns the summary of the first i + 1 of n consecutive stretches, for each i.

    It composes summaries that are 1, 2, 4 and so on stretches apart, so that the number of products in turn is log2 n.

    Args:
        summary: of the n stretches, in order, [M, n, ..] and [M, n, .., K, V].
    """
    D, S = summary
    distance = 1
    while distance < D.shape[1]:
        composed = compose((D[:, distance:], S[:, distance:]), (D[:, :-distance], S[:, :-distance]))
        D, S = (torch.cat([x[:, :distance], ends], 1) for x, ends in zip((D, S), composed, strict=True))
        distance *= 2
    return D, S
