"""The exchange of summaries over ranks beside products of matrices in one process, for each form of transition."""

import itertools

import torch

from gla_core import distributed
from gla_core.distributed import exchange
from gla_core.distributed.shard import LAYOUTS

M, H, K, V = 2, 2, 3, 4


def recurrence(transition, update, start, passed, backwards):
    """Returns the state that enters each of n pieces, and the last state, from [n, ..] of all pieces."""
    matrices = transition if transition.ndim == update.ndim else transition.diag_embed()
    entering, state = {}, start
    for place in reversed(range(len(update))) if backwards else range(len(update)):
        entering[place] = state
        state = state if passed is None or passed[place] else torch.zeros_like(state)
        state = torch.einsum("mhij,mhjv->mhiv", matrices[place], state) + update[place]
    return entering, state


def check_every_form_of_transition(ranks):
    """The gather and the scan give every rank the states that enter its pieces."""
    generator = torch.Generator().manual_seed(0)
    forms, flags = ((K,), (K, K)), (False, True)
    for form, layout, by_row, backwards, cuts in itertools.product(forms, LAYOUTS, *[flags] * 3):
        cut = distributed.shard(2, layout=layout)
        n = len(cut.places) * ranks.number
        transition, update = (
            torch.randn(n, M, H, *sizes, dtype=torch.float64, generator=generator).to(ranks.device)
            for sizes in (form, (K, V))
        )
        start = torch.randn(M, H, K, V, dtype=torch.float64, generator=generator).to(ranks.device)
        passed = (torch.rand(n, generator=generator) < 0.7).to(ranks.device) if cuts else None
        expected, final = recurrence(transition, update, start, passed, backwards)
        pieces = [x[list(cut.places)] for x in (transition, update)]  # [P, M, ..]
        summary = tuple((x.transpose(0, 1) if by_row else x).flatten(0, 1) for x in pieces)
        gathered = list(enumerate(exchange.gather(cut, summary, by_row)()))
        order = reversed(gathered) if backwards else gathered
        folded, last = exchange.fold(order, start, cut.places, passed, to_end=True)
        scanned = exchange.scan(cut, summary, start, passed, backwards, by_row)
        assert folded.keys() == scanned.keys() == set(cut.places)
        torch.testing.assert_close(last, final)
        for place in cut.places:
            torch.testing.assert_close(folded[place], expected[place])
            torch.testing.assert_close(scanned[place], expected[place])
