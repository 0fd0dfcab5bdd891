"""The layer as a module: other projections, sharded, compiled, on any device; its request; bad options and inputs."""

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gla_core as gla
from gla_core.nn import GatedLinearAttention

SIZES = ("num_heads", "num_kv_heads", "num_v_heads", "head_dim", "conv_size", "gate_low_rank_dim", "expand_ratio")
SIZES = (*SIZES, "d_state", "d_conv", "headdim")
KINDS = [getattr(gla.nn, name) for name in sorted(set(gla.nn.__all__) - {"GLAState"})]


class LoRA(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Int8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, self.weight * self.scale)


@pytest.mark.parametrize("wrapper", [LoRA, Int8Linear])
def test_projections_may_be_other_modules(wrapper, make_layer):
    layer = make_layer("conv", torch.float32)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
        setattr(layer, name, wrapper(getattr(layer, name)))
    x = torch.randn(2, 5, 16)
    y, state = layer(x, layer.initial_state(2), output_final_state=True)
    torch.testing.assert_close(y, layer(x)[0])
    assert (state.recurrent.dtype, state.conv[0].dtype) == (torch.float32, torch.float32)


def test_initial_state_of_a_layer_without_floating_parameters(small):
    layer = GatedLinearAttention(**small, use_short_conv=True)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).data = parameter.to(torch.int8)
    state = layer.initial_state(2, device="meta")
    assert {(t.dtype, t.device.type) for t in (state.recurrent, *state.conv)} == {(torch.float32, "meta")}


def test_fsdp2_with_mixed_precision(make_layer):
    import torch.distributed as dist  # takes half a second, and only this test needs it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    layer = make_layer("conv_bias", torch.bfloat16).float()
    x = torch.randn(2, 11, 16).bfloat16().float()
    expected = layer(x)[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        register_fsdp_forward_method(layer, "step")
        state = layer.initial_state(2)
        assert [type(t) for t in (state.recurrent, *state.conv)] == [Tensor] * 4
        y, state = layer(x[:, :5], state, output_final_state=True)
        y_more, state = layer(x[:, 5:10], state, output_final_state=True)
        y_token, _ = layer.step(x[:, 10], state)
        (y.sum() + y_more.sum()).backward()
        assert all(parameter.grad.full_tensor().isfinite().all() for parameter in layer.parameters())
    finally:
        dist.destroy_process_group()
    assert (torch.cat([y, y_more, y_token[:, None]], dim=1) - expected).norm() < 0.02 * expected.norm()


def test_device_and_dtype(small):
    layer = GatedLinearAttention(**small, use_short_conv=True, conv_bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("use_output_gate", [False, True])
def test_reset_parameters_does_what_the_constructor_does(by_module, use_output_gate, small):
    options = {**small, "use_short_conv": True, "conv_bias": True, "use_output_gate": use_output_gate}
    torch.manual_seed(1)
    expected = GatedLinearAttention(**options)
    layer = GatedLinearAttention(**options, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.detach().fill_(float("nan"))
    torch.manual_seed(1)
    if by_module:  # as FSDP initialises modules
        for module in layer.modules():
            if module is not layer and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        layer.reset_parameters()
    torch.testing.assert_close(dict(layer.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype", "dynamic", "backend"),
    [
        ("conv_bias", torch.float32, False, "aot_eager"),
        ("plain", torch.bfloat16, False, "aot_eager"),
        ("multi_query", torch.bfloat16, True, "eager"),  # aot_eager takes seconds with unknown sizes
    ],
)
def test_compile(name, dtype, dynamic, backend, make_layer):
    torch._dynamo.reset()
    layer = make_layer(name, dtype)
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for i, T in enumerate((9, 40) if dynamic else (9,)):
        x, dy = torch.randn(2, 2, T, 16, dtype=dtype)
        x.requires_grad_()
        wanted = [x, *layer.parameters()]
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            y = compiled(x)[0]
        expected_y = layer(x)[0]
        torch.testing.assert_close(y, expected_y)
        grads, expected = (torch.autograd.grad(out, wanted, dy) for out in (y, expected_y))
        torch.testing.assert_close(grads, expected)


def test_the_request_reaches_every_op(small):
    layer = GatedLinearAttention(**small, backend="reference")
    assert layer(torch.randn(1, 3, 16))[0].shape == (1, 3, 16)
    layer.backend = "refrence"
    with pytest.raises(gla.UnknownBackendError, match="did you mean 'reference'"):
        layer(torch.randn(1, 3, 16))
    with pytest.raises(gla.UnknownBackendError, match="did you mean 'reference'"):
        layer.step(torch.randn(1, 16), layer.initial_state(1))


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("refrence", gla.UnknownBackendError, "backend=: unknown backend 'refrence'; did you mean 'reference'"),
        ("chunk_gla_fw=reference", gla.UnknownOpError, "did you mean 'chunk_gla_fwd'"),
        (1, TypeError, "backend= is int; expected a string"),
    ],
)
def test_a_bad_request_is_found_at_construction(backend, error, message, small):
    with pytest.raises(error, match=message):
        GatedLinearAttention(**small, backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number, at least 1"),
        ({"num_heads": 2.0}, "num_heads is 2.0; expected a whole number"),
        ({"num_heads": -4}, "num_heads is -4; expected a whole number"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; expected a whole number"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads = 3"),
        ({"conv_size": 0}, "conv_size is 0; expected a whole number"),
        ({"gate_low_rank_dim": 0}, "gate_low_rank_dim is 0; expected a whole number"),
        ({"expand_k": 0.3}, r"hidden_size \* expand_k is 4.8; expected a whole number"),
        ({"expand_v": 0.0}, r"hidden_size \* expand_v is 0.0; expected a whole number, at least 1"),
        ({"expand_v": float("nan")}, r"hidden_size \* expand_v is nan; expected a whole number"),
        ({"num_heads": 3}, r"hidden_size \* expand_k is 8; expected a multiple of num_heads = 3"),
        ({"num_heads": True}, "num_heads is True; expected a whole number"),
        ({"num_heads": torch.tensor(2)}, r"num_heads is tensor\(2\); expected a whole number"),
        *(
            ({"gate_logit_normalizer": number}, f"gate_logit_normalizer is {number}; expected a finite number above 0")
            for number in (0, -1, math.inf, math.nan)
        ),
        ({"clamp_min": 0.5}, "clamp_min is 0.5; expected at most 0"),
    ],
)
def test_bad_options(options, message, small):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(**{**small, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_numpy(kind):
    """A layer has Python's integers, whatever integers it was given."""
    known = inspect.signature(kind).parameters
    sizes = {name: 16 for name in ("hidden_size", "d_model") if name in known}
    sizes |= {name: 2 for name in SIZES if name in known}
    expected = {name: x for name, x in vars(kind(**sizes)).items() if type(x) is int}
    layer = kind(**{name: np.int64(size) for name, size in sizes.items()})
    assert len(expected) >= 4
    assert {name: x for name, x in vars(layer).items() if type(x) is int} == expected
    assert all(type(size) is int for weight in layer.parameters() for size in weight.shape)
    assert "int64" not in repr(layer)


@pytest.mark.parametrize("number", [2**31, 1e300, 10**30])
def test_large_gate_logit_normalizers(number, small):
    """They make gates of 1, where the op takes none as large."""
    torch.manual_seed(0)
    layer = GatedLinearAttention(**small, gate_logit_normalizer=number)
    x = torch.randn(2, 5, 16)
    y, _ = layer(x)
    layer.gate_logit_normalizer = math.inf
    torch.testing.assert_close(y, layer(x)[0])


@pytest.mark.parametrize(
    ("x", "cu_seqlens", "error", "message"),
    [
        (torch.zeros(5, 16), None, ValueError, r"x has shape \[5, 16\]; expected \[B, T, hidden_size\]"),
        (torch.zeros(1, 5, 8), None, ValueError, r"x has shape \[1, 5, 8\]; .* with hidden_size=16"),
        ([1.0], None, TypeError, "x is list; expected a tensor"),
        (torch.zeros(2, 5, 16), torch.tensor([0, 5]), ValueError, "cu_seqlens goes with B = 1; x has B = 2"),
        (torch.zeros(1, 5, 16), torch.tensor([0.0, 5]), TypeError, "cu_seqlens is float32; expected int32 or int64"),
        (torch.zeros(1, 5, 16), torch.tensor([], dtype=torch.int32), ValueError, "cu_seqlens is empty"),
        (torch.zeros(1, 5, 16), torch.tensor([[0, 5]]), ValueError, r"cu_seqlens has shape \[1, 2\]"),
    ],
)
@pytest.mark.parametrize("name", ["plain", "conv"])
def test_bad_input(name, x, cu_seqlens, error, message, make_layer):
    with pytest.raises(error, match=message):
        make_layer(name, torch.float32)(x, cu_seqlens=cu_seqlens)


def test_bad_states(make_layer):
    plain, conv = make_layer("plain"), make_layer("conv")
    x = torch.zeros(2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x has shape \[2, 1, 16\]; expected \[B, hidden_size\]"):
        plain.step(x[:, None], plain.initial_state(2))
    with pytest.raises(ValueError, match=r"state.recurrent has shape \[3, 2, 4, 8\]; .* with N=2, H=2, K=4, V=8"):
        plain.step(x, plain.initial_state(3))
    with pytest.raises(TypeError, match="state is Tensor; expected a GLAState"):
        plain.step(x, plain.initial_state(2).recurrent)
    with pytest.raises(ValueError, match=r"state.conv has 0 tensors; expected 3"):
        conv.step(x, plain.initial_state(2))
    with pytest.raises(ValueError, match=r"state.conv has 3 tensors; expected 0"):
        plain(x[:, None], conv.initial_state(2))
    state = conv.initial_state(2)
    short = state._replace(conv=(state.conv[0], state.conv[1][:, 1:], state.conv[2]))
    with pytest.raises(ValueError, match=r"state.conv\[1\] has shape \[2, 2, 8\]; .* with N=2, conv_size-1=3, width=8"):
        conv(x[:, None], short)
