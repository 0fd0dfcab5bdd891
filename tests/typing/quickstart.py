"""A user's code for the type checker. `make check` checks this file; nothing runs it."""

from typing import Any, assert_type

import torch
from torch import Tensor

import gla_core as gla
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops.gla import ChunkGla, ChunkGlaWithCheckpoints, LinearAttention

q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 16
x = torch.randn(2, 100, 128)


def needs_tensor(x: Tensor) -> Tensor:
    return x


def ops(wanted: bool) -> None:
    assert_type(gla.chunk_gla(q, k, v, g), ChunkGla)
    assert_type(gla.chunk_gla(q, k, v, g, output_final_state=wanted).o, Tensor)
    pair: tuple[Tensor, Tensor | None] = gla.chunk_gla(q, k, v, g, output_final_state=wanted)
    o, state = gla.chunk_gla(q, k, v, g, output_final_state=True)
    assert_type(o, Tensor)
    state = needs_tensor(state)
    assert_type(gla.chunk_gla(q, k, v, g, None, pair[1]).state, Tensor | Any)
    assert_type(gla.chunk_gla(q, k, v, g, checkpoint_every=64), ChunkGlaWithCheckpoints)
    o, _, checkpoints = gla.chunk_gla(q, k, v, g, checkpoint_every=64)
    assert_type(checkpoints, Tensor)
    triple: tuple[Tensor, Tensor | None, Tensor] = gla.chunk_gla(q, k, v, g, checkpoint_every=64)
    needs_tensor(triple[2])
    assert_type(gla.chunk_gla_summary(k, v, g), gla.ChunkGlaSummary)
    assert_type(gla.chunk_gla_gradient_summary(q, o, g), gla.ChunkGlaGradientSummary)
    assert_type(gla.recurrent_gla_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state), gla.RecurrentGlaStep)
    bonus = torch.ones(4, 32)
    assert_type(gla.recurrent_gla_step(q[:, 0], k[:, 0], v[:, 0], None, state, bonus=bonus).o, Tensor)
    assert_type(gla.linear_attention(q, k, v), LinearAttention)
    pair = gla.linear_attention(q, k, v, output_final_state=True)
    assert_type(pair.o, Tensor)
    needs_tensor(pair.state)
    assert_type(gla.online_softmax(x), Tensor)
    assert_type(gla.softmax_attention(q, k, v), gla.SoftmaxAttention)


def layers(wanted: bool) -> None:
    layer = gla.nn.GatedLinearAttention(hidden_size=128, num_heads=4, device="cpu", dtype=torch.float32)
    y, state = layer(x, output_final_state=True)
    assert_type(y, Tensor)
    assert_type(state, gla.nn.GLAState | Any)
    y1, state = layer.step(x[:, 0], state)
    assert_type(y1, Tensor)
    y, state = layer(x, state, True)
    assert_type(state, gla.nn.GLAState | Any)
    assert_type(layer(x), tuple[Tensor, gla.nn.GLAState | Any])
    assert_type(layer(x, state, wanted), tuple[Tensor, gla.nn.GLAState | Any])
    assert_type(layer.forward(x, output_final_state=True), tuple[Tensor, gla.nn.GLAState | Any])
    maybe: tuple[Tensor, gla.nn.GLAState | None] = layer(x, residual=x)
    assert_type(gla.nn.HGRN2(128)(x, lower_bound=maybe[0]), tuple[Tensor, gla.nn.GLAState | Any])
    assert_type(gla.nn.Mamba2(128)(x, output_final_state=True), tuple[Tensor, gla.nn.GLAState | Any])
    assert_type(gla.nn.KimiDeltaAttention(128)(x), tuple[Tensor, gla.nn.GLAState | Any])
    y.square().mean().backward()
    assert_type(RMSNormGated(32)(q, gate=q), Tensor)
    assert_type(ShortConvolution(128, 4)(x), tuple[Tensor, Tensor])


@gla.use_backend("reference")
def evaluate(x: Tensor, times: int = 1) -> Tensor:
    return gla.online_softmax(x) * times


def requests() -> None:
    assert_type(evaluate(x, times=2), Tensor)
    with gla.use_backend("online_softmax=reference"):
        assert_type(gla.online_softmax(x, backend="reference"), Tensor)
    for info in gla.backends():
        assert_type(info.name, str)
    assert_type(gla.explain("chunk_gla", q, k, v, g), gla.Explanation)
