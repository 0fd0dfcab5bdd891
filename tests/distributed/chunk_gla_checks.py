"""`chunk_gla` over ranks beside one process that has all tokens."""

import contextlib
import dataclasses
import datetime
import inspect
import itertools
import os
import re
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import rows_of_rank
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import gla_core as gla
from gla_core import distributed
from gla_core.conformance import oracle
from gla_core.conformance.calls import random_logits
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.tensors import wide
from gla_core.distributed import exchange, over_ranks
from gla_core.workloads.inputs import GlaInputs, gla_inputs, normal

GATES = ("none", "mild", "strong", "-inf")
FORMS = ("key", "head", "constant")
HEADS = ({"G": 1}, {"G": 3}, {"R": 2})
DRAWN = 8
"""Number of random batches for each group of ranks."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of all ranks' tokens, and the number of tokens of each rank; with gate_normalizer, x.g holds logits."""

    x: GlaInputs
    lengths: tuple[int, ...]
    layout: str = "contiguous"
    final_state: bool = True
    gate_normalizer: int | None = None

    def rows(self, y, rank):
        """Returns the rows of y [B, T, ...] that a rank holds; a constant gate [Hv] has no rows, and is whole."""
        return y if y.ndim == 1 else rows_of_rank(y, rank, self.lengths, self.layout)


LEAVES = ("q", "k", "v", "g", "beta", "initial_state")


def leaves(x):
    return {name: y for name in LEAVES if (y := getattr(x, name, None)) is not None}


def tokens_of(x):
    """Returns the first arguments of an op: q, k, v, g, and beta if x has one."""
    return (x.q, x.k, x.v, x.g, *((x.beta,) if hasattr(x, "beta") else ()))


def results(x, o, state, do, dstate):
    """Returns the outputs, and the gradients of all inputs that are given."""
    outs, seeds = ((o,), (do,)) if state is None else ((o, state), (do, dstate))
    actual = torch.autograd.grad(outs, list(leaves(x).values()), seeds)
    named = {"o": o.detach(), **({} if state is None else {"state": state.detach()})}
    return named | {f"d{name}": d for name, d in zip(leaves(x), actual, strict=True)}


def with_leaves(x):
    return dataclasses.replace(x, **{name: y.detach().clone().requires_grad_() for name, y in leaves(x).items()})


def in_float64(x):
    return dataclasses.replace(x, **{name: y.double() for name, y in leaves(x).items()})


def compare(ranks, batch, tolerance, exact=False, alone=gla.chunk_gla, together=distributed.chunk_gla, **options):
    """Compares this rank's values and gradients with one process that has all tokens, in the same dtype or float64.

    Args:
        alone: the function that this process calls.
        together: the function that all ranks call.
    """
    generator = torch.Generator(ranks.device).manual_seed(0)
    x = with_leaves(in_float64(batch.x) if exact else batch.x)
    number = batch.gate_normalizer
    gates = {} if number is None else {"gate": "logsigmoid", "gate_normalizer": number}
    o, state = alone(*tokens_of(x), 0.3, x.initial_state, batch.final_state, x.cu_seqlens, **gates)
    do = normal(o.shape, batch.x.v.dtype, generator)
    dstate = None if state is None else normal(state.shape, wide(do.dtype), generator)
    whole = results(x, o, state, do.to(o.dtype), None if state is None else dstate.to(state.dtype))
    states = ("state", "dinitial_state")
    expected = {name: y if name in states else batch.rows(y, ranks.rank) for name, y in whole.items()}

    local = {name: y if name == "initial_state" else batch.rows(y, ranks.rank) for name, y in leaves(batch.x).items()}
    y = with_leaves(dataclasses.replace(x, **local))
    where = {} if "shard" in options else {"cu_seqlens": x.cu_seqlens, "layout": batch.layout}
    args = (*tokens_of(y), 0.3, y.initial_state, batch.final_state)
    o, state = together(*args, **where, **gates, **options)
    actual = results(y, o, state, batch.rows(do, ranks.rank), dstate)
    if y.g is not None and y.g.ndim == 1:  # each rank has its share
        dist.all_reduce(actual["dg"])
    assert actual.keys() == expected.keys()
    for name, ref in expected.items():
        assert actual[name].shape == ref.shape, name
        assert exact or actual[name].dtype == ref.dtype, name
        # dg of a rank with few tokens may be small compared with its summands.
        error = float((actual[name] - ref).double().norm()) / max(1.0, float(ref.double().norm()))
        assert error <= tolerance, f"{name} is off by {error:.3g}: {batch}"


def drawn(ranks, seed, inputs=gla_inputs, heads=HEADS):
    """Returns a random batch: one in two packed, one in two zigzag, and one rank in four without tokens.

    Two in three of those that have gates give them as logits.

    Args:
        inputs: makes the arguments of the op.
        heads: the groups of heads that are drawn.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    layout, is_packed = ("contiguous", "zigzag")[draw(0, 1)], draw(0, 1)
    lengths = tuple(min(draw(0, 3), 1) * 2 * draw(1, 40) for _ in range(ranks.number))
    T = sum(lengths)
    sizes = {"gates": GATES[draw(0, 3)], "initial_state": bool(draw(0, 1)), "K": 5, "V": 7}
    sizes |= {"gate_form": FORMS[seed % 3], **heads[seed // 3 % len(heads)]}
    if is_packed:
        offsets = [0, *sorted(draw(0, T) for _ in range(draw(0, 5))), T]
        packed = [end - start for start, end in itertools.pairwise(offsets)]
        padding = packed.pop() if layout == "contiguous" and len(packed) > 1 and draw(0, 1) else 0
        sizes |= {"lengths": tuple(packed), "padding": padding}
    x = inputs(B=2, T=T, dtype=torch.float64, seed=seed, device=ranks.device, **{"padding": 0, **sizes})
    number = (None, 1, 16)[draw(0, 2)] if x.g is not None else None
    return Batch(x if number is None else with_logits(x), lengths, layout, bool(draw(0, 1)), number)


# ---- checks for any number of ranks


def check_random_batches(ranks):
    for seed in range(DRAWN):
        compare(ranks, drawn(ranks, 100 * ranks.number + seed), 1e-12)


def check_random_batches_by_a_scan(ranks):
    """The scan over many ranks is used. In half of the batches, the gradient of an initial state uses the gather."""
    with mock.patch.object(exchange, "MOST_GATHERED", 0):
        for seed in range(DRAWN):
            batch = drawn(ranks, 200 * ranks.number + seed)
            compare(ranks, dataclasses.replace(batch, final_state=False), 1e-12)


def check_pieces_in_segments(ranks):
    """Pieces are cut into segments, as on a GPU, where this fills the device."""

    def segments(heads, tokens, device):
        return next((n for n in (5, 4, 3, 2) if tokens % n == 0), 1)

    with mock.patch.object(over_ranks, "segments_of_a_piece", segments):
        for seed in range(DRAWN):
            compare(ranks, drawn(ranks, 300 * ranks.number + seed), 1e-12)


def check_the_recurrence(ranks):
    """Every form of gate, and groups of queries and of values, agree with the recurrence, token by token."""

    def recurrence(*args):
        *tokens, final_state, cu_seqlens = args
        o, state = oracle.chunk_gla(*tokens, cu_seqlens)
        return o, state if final_state else None

    T, local = 4 * ranks.number, (4,) * ranks.number
    for (i, form), (j, heads) in itertools.product(enumerate(FORMS), enumerate(HEADS)):
        packed = {"lengths": (3, T - 3)} if (i + j) % 2 else {"T": T}
        x = gla_inputs(**packed, **heads, K=3, V=2, gate_form=form, dtype=torch.float64, initial_state=i == j)
        batch = Batch(x, local, ("contiguous", "zigzag")[j % 2], final_state=i == j)
        compare(ranks, batch, 1e-12, alone=recurrence)


def check_a_sequence_over_all_ranks(ranks):
    """A sequence covers all ranks, among other sequences, and a rank in the middle has no token."""
    lengths = tuple(0 if rank == 1 and ranks.number > 3 else 20 for rank in range(ranks.number))
    T = sum(lengths)
    for final_state in (False, True):
        sizes = {"dtype": torch.float64, "G": 2, "initial_state": final_state, "device": ranks.device}
        x = gla_inputs(lengths=(3, 0, T - 8, 5), gates="strong", **sizes)
        compare(ranks, Batch(x, lengths, final_state=final_state), 1e-12)
        compare(ranks, Batch(x, lengths, "zigzag", final_state), 1e-12)
        x = gla_inputs(T=T, gates="none", **sizes)
        compare(ranks, Batch(x, lengths, final_state=final_state), 1e-12)


def check_states_with_values_first(ranks):
    T = 10 * ranks.number
    for packed in ({}, {"lengths": (T - 3, 0, 3)}):
        sizes = {"T": T, "K": 5, "V": 7, "dtype": torch.float64, "initial_state": True, "device": ranks.device}
        batch = Batch(gla_inputs(**sizes, **packed), (10,) * ranks.number)
        tokens = [batch.rows(y, ranks.rank) for y in (batch.x.q, batch.x.k, batch.x.v, batch.x.g)]
        state, where = batch.x.initial_state, {"cu_seqlens": batch.x.cu_seqlens}
        expected = distributed.chunk_gla(*tokens, None, state, True, **where)
        actual = distributed.chunk_gla(*tokens, None, state.mT, True, **where, state_v_first=True)
        torch.testing.assert_close(actual.o, expected.o)
        torch.testing.assert_close(actual.state, expected.state.mT)
        assert distributed.chunk_gla(*tokens, **where, state_v_first=True).state is None


def with_logits(x):
    return dataclasses.replace(x, g=random_logits(x.g))


def check_bfloat16(ranks):
    x = gla_inputs(B=2, T=40 * ranks.number, dtype=torch.bfloat16, gate_dtype=torch.float32, initial_state=True)
    lengths = (40,) * ranks.number
    compare(ranks, Batch(x, lengths), 2 * GRADIENT[torch.bfloat16])
    compare(ranks, Batch(x, lengths, "zigzag"), 2 * GRADIENT[torch.bfloat16])
    x = with_logits(gla_inputs(B=2, T=40 * ranks.number, dtype=torch.bfloat16, initial_state=True))
    compare(ranks, Batch(x, lengths, gate_normalizer=16), 2 * GRADIENT[torch.bfloat16])


def check_autocast(ranks):
    """q, k and v are cast; gates and states stay float32."""
    x = gla_inputs(T=8 * ranks.number, initial_state=True)
    local = slice(8 * ranks.rank, 8 * ranks.rank + 8)
    q, k, v, g = (y[:, local] for y in (x.q, x.k, x.v, x.g))
    with torch.autocast("cpu", torch.bfloat16):
        o, state = distributed.chunk_gla(q.requires_grad_(), k, v, g, None, x.initial_state, True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    (dq,) = torch.autograd.grad(o.float().sum(), q)
    expected, _ = gla.chunk_gla(*(y.bfloat16() for y in (x.q, x.k, x.v)), x.g, None, x.initial_state)
    assert dq.dtype == torch.float32
    assert relative_error(o, expected[:, local]) <= 2 * FORWARD[torch.bfloat16]


def check_one_gather_each_way(ranks):
    """A layer with a shard makes one gather per direction; whether lengths were given does not change results."""
    lengths = (10,) * ranks.number
    x = gla_inputs(lengths=(4, 10 * ranks.number - 4), dtype=torch.float64)
    for layout in ("contiguous", "zigzag"):
        batch, where = Batch(x, lengths, layout, final_state=False), {"layout": layout}
        asked, gathers = collectives(distributed.shard, 10, x.cu_seqlens, **where)
        assert gathers == [GATHER]
        known, gathers = collectives(distributed.shard, 10, x.cu_seqlens, **where, lengths=lengths)
        assert gathers == []
        for cut in (asked, known):
            compare(ranks, batch, 1e-12, shard=cut)
        q, k, v = (batch.rows(y, ranks.rank).requires_grad_() for y in (x.q, x.k, x.v))
        (o, _), forward = collectives(distributed.chunk_gla, q, k, v, shard=known)
        _, backward = collectives(o.sum().backward)
        assert forward == backward == [GATHER]


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COMMUNICATING = (
    "all_",
    "barrier",
    "batch_isend",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "scatter",
    "send",
)


def collectives(function, *args, **kwargs):
    """Returns the function's result, and the names of the torch.distributed functions that it calls to communicate."""
    called = []

    def noted(name):
        original = getattr(dist, name)
        return lambda *args, **kwargs: (called.append(name), original(*args, **kwargs))[1]

    with contextlib.ExitStack() as stack:
        for name in dir(dist):
            if name.startswith(COMMUNICATING) and inspect.isfunction(getattr(dist, name)):
                stack.enter_context(mock.patch.object(dist, name, noted(name)))
        actual = function(*args, **kwargs)
    return actual, called


def check_nothing_waits_for_offsets(ranks):
    """The host reads no tensor of a shard: tensors without values work, too."""
    lengths = (10,) * ranks.number
    for layout in ("contiguous", "zigzag"):
        with FakeTensorMode():
            offsets = torch.empty(4, dtype=torch.int32)
            cut = distributed.shard(10, offsets, layout=layout, lengths=lengths)
        assert len(cut.packed.parts) == 3 * len(cut.places) + 1


def check_one_state_is_sent_for_packed_sequences(ranks):
    """One state is sent for any number of packed sequences, unless initial or final states are asked for."""
    x = gla_inputs(lengths=(2,) * 5 * ranks.number, H=2, K=4, V=3)
    local = slice(10 * ranks.rank, 10 * ranks.rank + 10)
    tokens = [y[:, local] for y in (x.q, x.k, x.v, x.g)]
    cut = distributed.shard(10, x.cu_seqlens, lengths=(10,) * ranks.number)
    with mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as gather:
        for final_state in (False, True):
            distributed.chunk_gla(*tokens, None, None, final_state, shard=cut)
    one = 2 * 4 * (1 + 3)  # number of elements of a decay and a state
    assert [call.args[1].numel() for call in gather.call_args_list] == [one, 5 * ranks.number * one]


def check_the_longest_sequence_is_known(ranks):
    """The op learns that no part of a sequence is longer than `max_seqlen`, nor than this rank's tokens."""
    x = gla_inputs(lengths=(5, 2 * ranks.number, 5), dtype=torch.float64, device=ranks.device)
    T = x.q.shape[1]
    lengths = tuple(T // ranks.number + (rank < T % ranks.number) for rank in range(ranks.number))
    longest, module = max(5, 2 * ranks.number), sys.modules[distributed.chunk_gla.__module__]
    batch, hints, op = Batch(x, lengths), [], module._CHUNK_GLA
    for name in ("forward", "backward"):
        function, place = getattr(op, name), getattr(op, f"{name}_spec").parameters.index("max_seqlen")

        def noted(*args, function=function, place=place):
            hints.append(args[place])
            return function(*args)

        with mock.patch.object(module, "_CHUNK_GLA", dataclasses.replace(op, **{name: noted})):
            compare(ranks, batch, 1e-12, max_seqlen=longest)
    assert hints == 2 * [min(longest, lengths[ranks.rank])]


def check_nothing_passes_between_sequences(ranks):
    """Infinities and NaN of one sequence stay in it, forwards and backwards."""
    each = 12 if ranks.number > 1 else 16
    T = each * ranks.number
    x = gla_inputs(lengths=(7, T - 14, 7), dtype=torch.float64)
    x.v[:, :7] = x.v[:, T - 7 :] = torch.inf
    middle = (torch.arange(T) >= 7) & (torch.arange(T) < T - 7)
    for layout in ("contiguous", "zigzag"):
        batch = Batch(x, (each,) * ranks.number, layout)
        q, k, v, g = (batch.rows(y, ranks.rank).requires_grad_() for y in (x.q, x.k, x.v, x.g))
        o, _ = distributed.chunk_gla(q, k, v, g, cu_seqlens=x.cu_seqlens, layout=layout)
        o.sum().backward()
        inside = batch.rows(middle[None], ranks.rank)
        assert all(y[inside].isfinite().all() for y in (o, q.grad, k.grad, v.grad, g.grad))


def check_groups(ranks):
    """A one-dimensional mesh and a group of some ranks work; a group without this rank is refused."""
    x = gla_inputs(T=6 * ranks.number, dtype=torch.float64)
    compare(ranks, Batch(x, (6,) * ranks.number), 1e-12, group=init_device_mesh("cpu", (ranks.number,)))
    few = dist.new_group([0])
    y = gla_inputs(T=6, dtype=torch.float64)
    if ranks.rank == 0:
        compare(ranks, Batch(y, (6,)), 1e-12, group=few)
    else:
        refused(TypeError, "that this rank is in", y.q, y.k, y.v, group=few)


def refused(error, message, *args, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        distributed.chunk_gla(*args, **kwargs)


def check_bad_arguments(ranks):
    """Every rank refuses bad arguments by itself, before anything is sent."""
    x = gla_inputs(lengths=(4, 6), H=2, K=4, V=3)
    q, k, v, g = x.q, x.k, x.v, x.g
    cut = distributed.shard(10, x.cu_seqlens, lengths=(10,) * ranks.number)
    refused(ValueError, "k has shape [1, 10, 2, 3]; expected [B, T, H, K]", q, k[..., :3], v, g, shard=cut)
    refused(ValueError, "initial_state has shape", q, k, v, g, None, torch.zeros(3, 2, 4, 3), shard=cut)
    refused(ValueError, "q has 9 tokens; expected 10", q[:, 1:], k[:, 1:], v[:, 1:], shard=cut)
    refused(ValueError, "shard is given", q, k, v, cu_seqlens=x.cu_seqlens, shard=cut)
    refused(ValueError, "shard is given", q, k, v, max_seqlen=4, shard=cut)
    refused(ValueError, "layout is 'zig'", q, k, v, layout="zig")
    refused(ValueError, "tokens is 9; expected an even number", q[:, 1:], k[:, 1:], v[:, 1:], layout="zigzag")
    refused(ValueError, "N of at least 1", q, k, v, cu_seqlens=torch.tensor([0]))


def check_compiled(ranks):
    """A compiled function may call the op, which runs eagerly between two graphs."""
    if ranks.number > 1:  # compiling takes seconds
        return
    x = gla_inputs(lengths=(4, 6), dtype=torch.float64)
    cut = distributed.shard(10, x.cu_seqlens, lengths=(10,))

    def function(q, k, v, g):
        return distributed.chunk_gla(2 * q, k, v, g, shard=cut)[0].square().sum()

    tokens = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g)]
    eager = torch.autograd.grad(function(*tokens), tokens)
    compiled = torch.autograd.grad(torch.compile(function, backend="aot_eager")(*tokens), tokens)
    for d, ref in zip(compiled, eager, strict=True):
        assert relative_error(d, ref) <= 1e-12


# ---- checks for two ranks that do not agree


def check_one_rank_that_fails(ranks):
    """The other rank waits no longer than the timeout of the group."""
    dist.barrier()  # the timeout also limits the making of the group
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    x = gla_inputs(T=6)
    begin = time.monotonic()
    if ranks.rank == 0:
        refused(ValueError, "v has shape", x.q, x.k, x.v[:, 1:], group=group)
    else:
        refused(RuntimeError, "", x.q, x.k, x.v, group=group)
        assert time.monotonic() - begin < 20
    dist.barrier()


def check_ranks_that_differ(ranks):
    """With GLA_CHECK=1 all ranks raise."""
    os.environ["GLA_CHECK"] = "1"
    gla.reload_environment()
    x = gla_inputs(lengths=(4, 8), device=ranks.device)
    offsets = x.cu_seqlens + torch.tensor([0, ranks.rank, 0], device=ranks.device)
    tokens = [y[:, :6] for y in (x.q, x.k, x.v, x.g)]
    refused(
        ValueError,
        "cu_seqlens is [0, 5, 12] on rank 1 of the group and [0, 4, 12] on rank 0",
        *tokens,
        cu_seqlens=offsets,
    )
    offsets = torch.tensor([0, 4, 13], device=ranks.device)
    refused(ValueError, "cu_seqlens is [0, 4, 13]; expected", *tokens, cu_seqlens=offsets)
    for wrong in (offsets[:2], offsets.new_tensor([1, 12])):  # [0, 4], and a row in front of the first sequence
        message = f"cu_seqlens is {wrong.tolist()}; expected offsets from 0 to"
        refused(ValueError, message, *tokens, cu_seqlens=wrong, layout="zigzag")
    refused(ValueError, "max_seqlen is 7; the longest sequence", *tokens, cu_seqlens=x.cu_seqlens, max_seqlen=7)
    narrow = [y[..., : 8 + ranks.rank] for y in (x.q, x.k)]
    gates = x.g[..., : 8 + ranks.rank]
    refused(ValueError, "K is 9 on rank 1 of the group and 8 on rank 0", *narrow, x.v, gates)
    gates = x.g[:, :6] if ranks.rank == 0 else x.g[:, :6, :, 0]
    refused(ValueError, "form of g is head on rank 1 of the group and key on rank 0", *tokens[:3], gates)
    agreeing = gla_inputs(lengths=(4, 8), dtype=torch.float64, device=ranks.device)
    for layout, final_state in itertools.product(("contiguous", "zigzag"), (False, True)):
        compare(ranks, Batch(agreeing, (6, 6), layout, final_state), 1e-12)
    del os.environ["GLA_CHECK"]
    gla.reload_environment()


NUMBERS = {check_one_rank_that_fails: 2, check_ranks_that_differ: 2}
