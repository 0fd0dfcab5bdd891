"""`chunk_delta` over ranks, whose transitions are dense, beside one process that has all tokens."""

import dataclasses
import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from chunk_gla_checks import GATHER, Batch, collectives, compare, drawn
from ranks import rows_of_rank

import gla_core as gla
from gla_core import distributed
from gla_core.conformance import oracle
from gla_core.distributed import exchange, over_ranks
from gla_core.distributed.shard import LAYOUTS
from gla_core.workloads.inputs import delta_inputs

DRAWN = 3
"""Number of random batches for each group of ranks."""
HEADS = ({"R": 1}, {"R": 2})
compare_delta = functools.partial(compare, alone=gla.chunk_delta, together=distributed.chunk_delta)


def check_the_recurrence_of_a_delta_rule(ranks):
    """Outputs, final states and gradients equal those of the recurrence, with states, packed, and in both layouts."""

    def recurrence(*args):
        *tokens, final_state, cu_seqlens = args
        o, state = oracle.chunk_delta(*tokens, cu_seqlens)
        return o, state if final_state else None

    T, lengths, seed = 6 * ranks.number, (6,) * ranks.number, itertools.count()
    for layout in LAYOUTS:
        for packed, states in ((None, True), ((T - 4, 0, 4), True), ((T - 4, 0, 4), False)):
            i = next(seed)
            sizes = {"T": T, "B": 2} if packed is None else {"lengths": packed}
            sizes |= {"gate_form": ("key", "head", "constant")[i % 3], "gates": ("mild", "none", "-inf")[i // 2]}
            x = delta_inputs(**sizes, R=1 + i % 2, K=3, V=4, dtype=torch.float64, initial_state=states)
            batch = Batch(x, lengths, layout, final_state=states)
            compare_delta(ranks, batch, 1e-12, alone=recurrence)


def check_random_batches_of_a_delta_rule(ranks):
    """By a gather, by the scan of many ranks, and with pieces cut into segments, as on a GPU."""

    def segments(heads, tokens, device):
        return next((n for n in (5, 4, 3, 2) if tokens % n == 0), 1)

    gather, scan = ((exchange, "MOST_GATHERED", number) for number in (exchange.MOST_GATHERED, 0))
    for seed in range(DRAWN):
        batch = drawn(ranks, 400 * ranks.number + seed, delta_inputs, HEADS)
        if seed % 3 == 1:  # final states need the gather
            batch = dataclasses.replace(batch, final_state=False)
        with mock.patch.object(*(gather, scan, (over_ranks, "segments_of_a_piece", segments))[seed % 3]):
            compare_delta(ranks, batch, 1e-11)


def check_logits_of_a_delta_rule(ranks):
    """Norms, gates and betas are computed on each rank, and gradients reach their parameters from all tokens."""
    T, lengths = 8 * ranks.number, (8,) * ranks.number
    x = delta_inputs(lengths=(3, T - 5), padding=2, R=2, K=3, V=4, dtype=torch.float64)
    tokens = [x.q * 3, x.k * 2, x.v, torch.randn_like(x.g), torch.randn_like(x.beta)]
    for y in tokens:
        y[:, T - 2 :] = torch.nan  # rows of no sequence
    H = x.beta.shape[2]
    for gate in ("softplus", "bounded"):
        parameters = [torch.linspace(-1, 1, n, dtype=torch.float64).requires_grad_() for n in (H, 3 * H)]
        bound = (-2.0,) if gate == "bounded" else ()
        gates = (gate, parameters[0], parameters[1].view(H, 3), *bound)
        options = {"normalize": 1e-6, "beta_limit": 2.0, "gate": gates}
        whole = [y.detach().requires_grad_() for y in tokens]
        o, _ = gla.chunk_delta(*whole, cu_seqlens=x.cu_seqlens, **options)
        do = torch.randn_like(o)
        *expected, dA, dbias = torch.autograd.grad(o, [*whole, *parameters], do)
        local = [rows_of_rank(y, ranks.rank, lengths, "contiguous").detach().requires_grad_() for y in tokens]
        cut = distributed.shard(8, x.cu_seqlens, lengths=lengths)
        (y, _), forward = collectives(distributed.chunk_delta, *local, shard=cut, **options)
        mine = rows_of_rank(do, ranks.rank, lengths, "contiguous")
        actual, backward = collectives(torch.autograd.grad, y, [*local, *parameters], mine)
        assert forward == backward == [GATHER]
        *actual, dA_actual, dbias_actual = actual
        dist.all_reduce(dA_actual)
        dist.all_reduce(dbias_actual)
        torch.testing.assert_close((dA_actual, dbias_actual), (dA, dbias))
        torch.testing.assert_close(y, rows_of_rank(o, ranks.rank, lengths, "contiguous"))
        torch.testing.assert_close(actual, [rows_of_rank(d, ranks.rank, lengths, "contiguous") for d in expected])
