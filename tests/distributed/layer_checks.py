"""Layers whose sequences are spread over ranks, compared with the same layers in one process that has all tokens."""

import copy
import os
import re
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from chunk_gla_checks import GATHER, collectives
from ranks import rows_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gla_core as gla
from gla_core import distributed
from gla_core.conformance.tolerances import relative_error
from gla_core.distributed import history
from gla_core.nn import HGRN2, DeltaNet, GatedLinearAttention, KimiDeltaAttention, Mamba2

REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
DRAWN = 5
"""Number of random batches for each group of ranks."""


def layers(ranks):
    """Returns six different layers in float64; every parameter is random, so that none can be ignored unnoticed."""
    torch.manual_seed(0)
    made = nn.ModuleList(
        [
            GatedLinearAttention(16, num_heads=4, num_kv_heads=2, use_short_conv=True, feature_map="relu"),
            HGRN2(16, expand_ratio=4, use_short_conv=True, conv_size=3, conv_bias=True),
            GatedLinearAttention(16, num_heads=2),
            Mamba2(16, d_state=3, headdim=8, ngroups=2, D_has_hdim=True, bias=True),
            KimiDeltaAttention(16, head_dim=4, num_heads=1, num_v_heads=2, allow_neg_eigval=True, lower_bound=-5.0),
            DeltaNet(16, num_heads=2, use_gate=True, use_short_conv=False),
        ]
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.double().to(ranks.device)


def through(model, x, **where):
    """Runs the layers as in a residual network."""
    for layer in model:
        x = x + layer(x, **where)[0]
    return x


def compare(ranks, model, x, cu_seqlens, lengths, layout="contiguous", forward=through):
    """Compares outputs and gradients with one process; parameters' gradients are summed over ranks."""
    x = x.detach().requires_grad_()
    alone = copy.deepcopy(model)
    y = through(alone, x, cu_seqlens=cu_seqlens)
    dy = torch.randn_like(y)
    y.backward(dy)

    def local(z):
        return rows_of_rank(z, ranks.rank, lengths, layout)

    model.zero_grad()
    z = local(x).detach().requires_grad_()
    actual = forward(model, z, shard=distributed.shard(z.shape[1], cu_seqlens, layout=layout))
    actual.backward(local(dy))
    assert actual.shape == local(y).shape
    for name, mine, reference in (("y", actual, y), ("dx", z.grad, x.grad)):
        error = float(((mine - local(reference)).norm() / reference.norm().clamp(min=1)).detach())
        assert error <= 1e-12, f"{name} is off by {error:.3g}: {lengths}, {layout}, {cu_seqlens}"
    for (name, parameter), reference in zip(model.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        assert relative_error(parameter.grad, reference.grad) <= 1e-12, f"d{name}: {lengths}, {layout}, {cu_seqlens}"


def check_layers_of_random_batches(ranks):
    """Batches are packed or not, in either layout; shards may be shorter than a convolution, or empty."""
    model = layers(ranks)
    for seed in range(DRAWN):
        generator = torch.Generator().manual_seed(100 * ranks.number + seed)

        def draw(low, high, generator=generator):
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        longest, layout = (2, 2, 20)[draw(0, 2)], ("contiguous", "zigzag")[draw(0, 1)]
        some = seed % ranks.number  # a rank with tokens
        lengths = tuple(2 * draw(int(rank == some), longest) for rank in range(ranks.number))
        T, cu_seqlens = sum(lengths), None
        if draw(0, 1):
            end = T if layout == "zigzag" else draw(1, T)
            offsets = [0, *sorted(draw(0, end) for _ in range(draw(0, 3))), end]
            cu_seqlens = torch.tensor(offsets, device=ranks.device)
        x = torch.randn(2 if cu_seqlens is None else 1, T, 16, dtype=torch.float64, generator=generator)
        compare(ranks, model, x.to(ranks.device), cu_seqlens, lengths, layout)


def check_a_layer_with_a_mesh(ranks):
    """The layer makes contiguous shards; its convolutions send once per direction, and no rows of other sequences."""
    model, mesh = layers(ranks), init_device_mesh(ranks.device.type, (ranks.number,))
    spread = layers(ranks)
    for layer in spread:
        layer.context_parallel = mesh
    spread.load_state_dict(model.state_dict())
    T = 5 * ranks.number
    cu_seqlens = torch.tensor([0, 3, T - 1, T], device=ranks.device)
    x = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(ranks.device)
    local = slice(5 * ranks.rank, 5 * ranks.rank + 5)
    with torch.no_grad(), mock.patch.object(history, "all_gather", wraps=history.all_gather) as gather:
        assert (
            relative_error(
                through(spread, x[:, local], cu_seqlens=cu_seqlens), through(model, x, cu_seqlens=cu_seqlens)[:, local]
            )
            <= 1e-12
        )
        assert gather.call_count == 4  # two of the six layers have no convolutions
        x[:, :3] = torch.nan
        y = through(spread, x[:, local], cu_seqlens=cu_seqlens)
        assert y[0, max(0, 3 - local.start) :].isfinite().all()


def check_how_often_layers_communicate(ranks):
    """Their convolutions and their op communicate once per direction, and packed sequences cost one more gather."""
    for layer in layers(ranks)[3:5]:
        x = torch.randn(1, 5, 16, dtype=torch.float64, device=ranks.device)
        layer.context_parallel = dist.group.WORLD
        for cu_seqlens, expected in ((None, 2), (torch.tensor([0, 3, 5 * ranks.number], device=ranks.device), 3)):
            (y, _), forward = collectives(layer, x, cu_seqlens=cu_seqlens)
            _, backward = collectives(y.sum().backward)
            assert forward == [GATHER] * expected
            assert backward == [GATHER, REDUCE_SCATTER]


def check_checkpointed_and_compiled_layers(ranks):
    """A forward that runs again in a backward sends again, in the same order on all ranks.

    Graphs end where ranks exchange, and compilation warns of no cached function that it would trace.
    """

    def again(model, x, **where):
        for layer in model:
            x = x + checkpoint(layer, x, use_reentrant=False, **where)[0]
        return x

    def compiled(model, x, **where):
        return x + torch.compile(model[0], backend="aot_eager")(x, **where)[0]

    x = torch.randn(1, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cu_seqlens, lengths = torch.tensor([0, 3, 20]), (12, 8)
    compare(ranks, layers(ranks), x, cu_seqlens, lengths, "zigzag", again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(ranks, layers(ranks)[:1], x, cu_seqlens, lengths, "zigzag", compiled)
    assert [text for text in (str(warning.message) for warning in caught) if "lru_cache" in text] == []


def check_what_a_layer_over_ranks_refuses(ranks):
    layer = GatedLinearAttention(16, use_short_conv=True, context_parallel=dist.group.WORLD)
    x, mask = torch.randn(1, 4, 16), torch.ones(1, 4)
    state, cut = layer.initial_state(1), distributed.shard(4)
    packed = distributed.shard(4, torch.tensor([0, 4 * ranks.number]))
    for error, arguments in {
        "state is given": {"state": state},
        "output_final_state is given": {"output_final_state": True},
        "attention_mask is given": {"attention_mask": mask},
        "both cu_seqlens and shard": {"cu_seqlens": torch.tensor([0, 4]), "shard": cut},
        "x has shape [1, 3, 16]; expected [B, T, hidden_size] with T=4": {"x": x[:, 1:], "shard": cut},
        "cu_seqlens goes with B = 1": {"x": x.expand(2, -1, -1), "shard": packed},
    }.items():
        with pytest.raises(ValueError, match=re.escape(error)):
            layer(**{"x": x, **arguments})
    with pytest.raises(ValueError, match="step reads one token"):
        layer.step(x[:, 0], state)


def check_layers_that_differ(ranks):
    """With GLA_CHECK=1 all ranks raise, before a convolution sends."""
    os.environ["GLA_CHECK"] = "1"
    gla.reload_environment()
    layer = GatedLinearAttention(16, use_short_conv=True, context_parallel=dist.group.WORLD)
    with pytest.raises(ValueError, match="B is 2 on rank 1 of the group and 1 on rank 0"):
        layer(torch.randn(1 + ranks.rank, 4, 16))
    layer(torch.randn(1, 4, 16))
    del os.environ["GLA_CHECK"]
    gla.reload_environment()


NUMBERS = {check_checkpointed_and_compiled_layers: 2, check_layers_that_differ: 2}
