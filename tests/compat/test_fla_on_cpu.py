"""The CPU versions of flash-linear-attention's Triton functions, against their definitions."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from gla_core.compat.fla import accelerate, on_cpu
from gla_core.compat.fla.accelerate import FUNCTIONS, HOMES

WIDE = {"dtype": torch.float64}


def normed(x, weight, bias, eps):
    y = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norms(affine, residual):
    x, other, g = (torch.randn(2, 3, 4, **WIDE) for _ in range(3))
    weight, bias = (torch.randn(4, **WIDE) if affine else None for _ in range(2))
    rest, total = (other, x + other) if residual else (None, x)
    expected = normed(total, weight, bias, 0.1)
    torch.testing.assert_close(on_cpu.rms_norm(x, weight, bias, rest, 0.1), expected)
    y, kept = on_cpu.rms_norm(x, weight, bias, rest, 0.1, prenorm=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(kept, total)
    gated = expected / (1 + torch.exp(-g)) * g
    torch.testing.assert_close(on_cpu.rms_norm_gated(x, g, weight, bias, "swish", rest, eps=0.1), gated)
    linear, offset = torch.randn(5, 4, **WIDE), torch.randn(5, **WIDE)
    actual = on_cpu.rms_norm_linear(x, weight, bias, linear, offset, rest, 0.1)
    torch.testing.assert_close(actual, expected @ linear.T + offset)


def test_a_norm_of_half_precision_keeps_its_sum_wide_where_asked():
    x = torch.randn(2, 4).bfloat16()
    y, kept = on_cpu.rms_norm(x, None, None, x, 1e-5, True, True)
    assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(kept, 2 * x.float())
    assert on_cpu.rms_norm(x, None, None, x.float(), 1e-5, True)[1].dtype == torch.float32


def test_activations():
    x, y, weight = torch.randn(3, 4, **WIDE), torch.randn(3, 4, **WIDE), torch.randn(5, 4, **WIDE)
    product = x * torch.sigmoid(x) * y
    torch.testing.assert_close(on_cpu.swiglu(x, y), product)
    torch.testing.assert_close(on_cpu.swiglu_linear(x, y, weight, None), product @ weight.T)
    torch.testing.assert_close(on_cpu.logsigmoid(x, 2.0), -torch.log(1 + torch.exp(-x)) / 2)


def convolved(x, weight, bias, before):
    """Computes one output at a time: x [T, D], weight [D, W], before [D, W]."""
    W = weight.shape[1]
    rows = torch.cat([before.T, x])
    return torch.stack([(rows[t + 1 : t + 1 + W] * weight.T).sum(0) + bias for t in range(len(x))]), rows[-W:].T


@pytest.mark.parametrize("lengths", [None, (2, 0, 5), (1, 1, 1)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_convolutions(lengths, index_dtype):
    D, W, N = 3, 4, 2 if lengths is None else 3
    x = torch.randn(2, 6, D, **WIDE) if lengths is None else torch.randn(1, sum(lengths), D, **WIDE)
    weight, bias, before = torch.randn(D, W, **WIDE), torch.randn(D, **WIDE), torch.randn(N, D, W, **WIDE)
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
    sequences = x.unbind(0) if lengths is None else x[0].split(lengths)
    actual, final = on_cpu.causal_conv1d(x, weight, bias, None, before, True, "silu", cu_seqlens=offsets)
    expected = [
        convolved(part, weight, bias, state) if len(part) else (part, state)
        for part, state in zip(sequences, before, strict=True)
    ]
    y = torch.cat([part for part, _ in expected]).view_as(x)
    torch.testing.assert_close(actual, F.silu(y))
    torch.testing.assert_close(final, torch.stack([state for _, state in expected]))
    assert on_cpu.causal_conv1d(x, weight, cu_seqlens=offsets)[1] is None


@pytest.mark.parametrize("shape", [(5, 3), (5, 1, 3), (1, 5, 3)])
def test_a_token_of_each_sequence(shape):
    x, residual = torch.randn(shape, **WIDE), torch.randn(shape, **WIDE)
    weight, bias, cache = torch.randn(3, 4, **WIDE), torch.randn(3, **WIDE), torch.randn(5, 3, 4, **WIDE)
    before = cache.clone()
    y, same = on_cpu.causal_conv1d_update(x, cache, residual, weight, bias)
    assert same is cache
    for i, token in enumerate(x.reshape(5, 1, 3)):
        expected, state = convolved(token, weight, bias, before[i])
        torch.testing.assert_close(y.reshape(5, 3)[i], expected[0] + residual.reshape(5, 3)[i])
        torch.testing.assert_close(cache[i], state)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction):
    logits, target = torch.randn(5, 7, **WIDE), torch.tensor([1, -100, 3, 0, 6])
    scaled = 3 * torch.tanh(2 * logits / 3)
    plain, squares = torch.zeros(5, **WIDE), torch.zeros(5, **WIDE)
    for i, t in enumerate(target.tolist()):
        if t >= 0:
            plain[i] = scaled[i].exp().sum().log() - scaled[i, t]
            squares[i] = 0.1 * scaled[i].exp().sum().log() ** 2
    reduce = {"mean": lambda x: x.sum() / 4, "sum": torch.sum, "none": lambda x: x}[reduction]
    options = {"logit_scale": 2.0, "logit_softcapping": 3.0}
    criterion = on_cpu.FusedCrossEntropyLoss(reduction=reduction, lse_square_scale=0.1, return_z_loss=True, **options)
    for actual, expected in zip(criterion(logits, target), (plain + squares, squares), strict=True):
        torch.testing.assert_close(actual, reduce(expected))
    if reduction != "none":
        arguments = (logits, target, torch.eye(7, **WIDE))
        actual = on_cpu.fused_linear_cross_entropy_loss(*arguments, reduction=reduction, **options)
        torch.testing.assert_close(actual, reduce(plain))
    with pytest.raises(NotImplementedError, match="l2warp"):
        on_cpu.fused_linear_cross_entropy_loss(logits, target, torch.eye(7, **WIDE), use_l2warp=True)
    assert math.isclose(float(on_cpu.FusedCrossEntropyLoss()(logits, target)), float(F.cross_entropy(logits, target)))


@pytest.fixture
def fla(monkeypatch):
    """Fake modules that define the replaced functions, and one that has imported some of them."""

    def original(name):
        return lambda *args, **kwargs: name

    homes = {home: {name: original(name) for name in members} for home, members in on_cpu.REPLACED.items()}
    homes |= {home: {name: original(name) for name in members} for home, members in HOMES.items()}
    homes["fla.layers.gla"] = {
        "repeat": original("repeat"),
        "GatedLinearAttention": type("Layer", (torch.nn.Module,), {}),
    }
    homes["fla.layers.hgrn2"] = {"HGRN2Attention": type("Layer", (torch.nn.Module,), {})}
    activations = homes["fla.modules.activations.ops"]
    activations["ACT2FN"] = {"silu": activations["swish"], "relu": F.relu}
    homes["fla.models.gla"] = {"RMS": None, "swiglu": activations["swiglu"], "ACT2FN": activations["ACT2FN"]}
    for home, members in homes.items():
        made = types.ModuleType(home)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, home, made)
    return lambda home, name: getattr(sys.modules[home], name)


def test_they_are_replaced_for_tensors_on_a_cpu_and_put_back(fla):
    x = torch.randn(2, 4)
    before = fla("fla.models.gla", "swiglu"), fla("fla.models.gla", "ACT2FN")["silu"]
    with accelerate(cpu=True) as acceleration:
        assert {"rms_norm", "swiglu", "causal_conv1d", "chunk_gla"} <= set(acceleration.replaced)
        assert acceleration.replaced["swiglu"] == ("fla.models.gla", "fla.modules.activations.ops")
        torch.testing.assert_close(fla("fla.models.gla", "swiglu")(x, x), F.silu(x) * x)
        torch.testing.assert_close(fla("fla.models.gla", "ACT2FN")["silu"](x), F.silu(x))
        assert fla("fla.models.gla", "ACT2FN")["relu"] is F.relu
        assert fla("fla.models.gla", "swiglu")(x.to("meta"), x.to("meta")) == "swiglu"
        assert fla("fla.modules.norm.layernorm", "rms_norm")(x=x.to("meta"), weight=None, bias=None) == "rms_norm"
        torch.testing.assert_close(
            fla("fla.modules.norm.layernorm", "rms_norm")(x=x, weight=None, bias=None), F.rms_norm(x, (4,), eps=1e-5)
        )
    assert (fla("fla.models.gla", "swiglu"), fla("fla.models.gla", "ACT2FN")["silu"]) == before


@pytest.mark.filterwarnings("ignore:there is no GPU")
def test_they_are_left_alone_unless_asked_for(fla):
    with accelerate() as acceleration:
        assert set(acceleration.replaced) == {*FUNCTIONS, "repeat", "mode"}
        assert fla("fla.models.gla", "swiglu")(1, 2) == "swiglu"
