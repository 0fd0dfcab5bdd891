"""The layer against a direct evaluation in float64: the convolution and the recurrence one token at a time."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.nn import GatedLinearAttention, GLAState

SMALL = {"hidden_size": 16, "expand_k": 0.5, "expand_v": 1.0, "num_heads": 2, "gate_low_rank_dim": 3}
LAYERS = {
    "plain": {},
    "no_gate": {"use_output_gate": False},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "multi_query": {"num_heads": 4, "num_kv_heads": 1, "use_short_conv": True},
    "conv": {"use_short_conv": True},
    "conv_bias": {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "conv_of_one": {"use_short_conv": True, "conv_size": 1},
    "not_affine": {"elementwise_affine": False, "norm_eps": 0.1},
    "other_gate": {"gate_logit_normalizer": 0.5, "clamp_min": -1.0, "expand_k": 1.0, "expand_v": 2.0},
}


def make_layer(name: str, dtype: torch.dtype = torch.float64) -> GatedLinearAttention:
    """A small layer with every parameter random, so that none could be left out unseen."""
    torch.manual_seed(0)
    layer = GatedLinearAttention(**{**SMALL, **LAYERS[name]})
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def evaluate(layer: GatedLinearAttention, options: dict, x: Tensor) -> Tensor:
    """The layer's output for x [B, T, hidden], from its parameters by their names in flash-linear-attention."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    options = {**SMALL, **options}
    heads = options["num_heads"]
    kv_heads = options.get("num_kv_heads", heads)
    x = x.double()
    q, k, v = (
        evaluate_convolution(x @ p[f"{n}_proj.weight"].T, p.get(f"{n}_conv1d.weight"), p.get(f"{n}_conv1d.bias"))
        for n in "qkv"
    )
    g = x @ p["gk_proj.0.weight"].T @ p["gk_proj.1.weight"].T + p["gk_proj.1.bias"]
    g = -torch.log(1 + torch.exp(-g)) / options.get("gate_logit_normalizer", 16)
    if "clamp_min" in options:
        g = torch.maximum(g, torch.tensor(options["clamp_min"], dtype=g.dtype))
    q, k, v, g = (
        t.unflatten(-1, (n, t.shape[-1] // n)) for t, n in ((q, heads), (k, kv_heads), (v, kv_heads), (g, kv_heads))
    )
    o, _ = oracle.chunk_gla(q, k, v, g)
    gated = options.get("use_output_gate", True)
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5))
    if options.get("elementwise_affine", True):
        o = o * p["g_norm_swish_gate.weight" if gated else "g_norm.weight"]
    o = o.flatten(-2)
    if gated:
        gate = x @ p["g_proj.weight"].T
        o = o * gate / (1 + torch.exp(-gate))
    return o @ p["o_proj.weight"].T


def evaluate_convolution(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """silu(bias + sum over i of weight[:, 0, W-1-i] x[t-i]), one output token and one input token at a time."""
    if weight is None:
        return x
    W = weight.shape[-1]
    rows = []
    for t in range(x.shape[1]):
        row = torch.zeros_like(x[:, t]) if bias is None else bias.expand_as(x[:, t])
        for i in range(min(W, t + 1)):
            row = row + weight[:, 0, W - 1 - i] * x[:, t - i]
        rows.append(F.silu(row))
    return torch.stack(rows, dim=1)


every_layer = pytest.mark.parametrize("name", LAYERS)


def pack(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def assert_same_state(state: GLAState, expected: GLAState, **tolerance: float) -> None:
    torch.testing.assert_close(state.recurrent, expected.recurrent, **tolerance)
    assert (state.conv is None) == (expected.conv is None)
    for inputs, expected_inputs in zip(state.conv or (), expected.conv or (), strict=True):
        torch.testing.assert_close(inputs, expected_inputs, **tolerance)


@every_layer
@pytest.mark.parametrize("T", [1, 2, 70])
def test_values(name: str, T: int) -> None:
    layer = make_layer(name)
    x = torch.randn(2, T, 16, dtype=torch.float64)
    y, state = layer(x)
    assert state is None
    torch.testing.assert_close(y, evaluate(layer, LAYERS[name], x), rtol=1e-10, atol=1e-10)


def test_clamp_min_bounds_the_gate() -> None:
    layer = make_layer("other_gate")
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    bounded, _ = layer(x)
    layer.clamp_min = None
    free, _ = layer(x)
    assert (bounded - free).abs().max() > 0.01


@every_layer
def test_gradients(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 40, 16, dtype=torch.float64)
    wanted = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(layer(x)[0], list(wanted.values()), dy)
    expected = torch.autograd.grad(evaluate(layer, LAYERS[name], x), list(wanted.values()), dy)
    for parameter, grad, expected_grad in zip(wanted, grads, expected, strict=True):
        assert expected_grad.abs().max() > 1e-6, f"{parameter} has no influence"
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
def test_gradients_reach_the_state(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 11, 16, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(layer(x)[0][:, 5:].sum(), x)
    _, state = layer(x[:, :5], output_final_state=True)
    (in_two,) = torch.autograd.grad(layer(x[:, 5:], state)[0].sum(), x)
    assert in_two[:, 4].abs().max() > 1e-6
    torch.testing.assert_close(in_two, whole, rtol=1e-10, atol=1e-10)


def shapes(**options: object) -> dict[str, list[int]]:
    layer = GatedLinearAttention(hidden_size=32, num_heads=4, gate_low_rank_dim=3, **options)
    return {name: list(value.shape) for name, value in layer.state_dict().items()}


def test_parameters() -> None:
    assert shapes() == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [16, 32],
        "v_proj.weight": [32, 32],
        "g_proj.weight": [32, 32],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [16, 3],
        "gk_proj.1.bias": [16],
        "g_norm_swish_gate.weight": [8],
        "o_proj.weight": [32, 32],
    }


def test_parameters_of_every_option() -> None:
    assert shapes(num_kv_heads=2, expand_v=2, use_short_conv=True, conv_size=5, conv_bias=True) == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [8, 32],
        "v_proj.weight": [32, 32],
        "q_conv1d.weight": [16, 1, 5],
        "q_conv1d.bias": [16],
        "k_conv1d.weight": [8, 1, 5],
        "k_conv1d.bias": [8],
        "v_conv1d.weight": [32, 1, 5],
        "v_conv1d.bias": [32],
        "g_proj.weight": [64, 32],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [8, 3],
        "gk_proj.1.bias": [8],
        "g_norm_swish_gate.weight": [16],
        "o_proj.weight": [32, 64],
    }


def test_parameters_without_output_gate() -> None:
    assert shapes(use_output_gate=False, use_short_conv=True) == {
        "q_proj.weight": [16, 32],
        "k_proj.weight": [16, 32],
        "v_proj.weight": [32, 32],
        "q_conv1d.weight": [16, 1, 4],
        "k_conv1d.weight": [16, 1, 4],
        "v_conv1d.weight": [32, 1, 4],
        "gk_proj.0.weight": [3, 32],
        "gk_proj.1.weight": [16, 3],
        "gk_proj.1.bias": [16],
        "g_norm.weight": [8],
        "o_proj.weight": [32, 32],
    }
    affine = shapes(use_output_gate=False)
    assert affine.keys() - shapes(use_output_gate=False, elementwise_affine=False).keys() == {"g_norm.weight"}


def test_default_sizes() -> None:
    with torch.device("meta"):
        layer = GatedLinearAttention()
    expected = {"q_proj": [512, 1024], "v_proj": [1024, 1024], "gk_proj.0": [16, 1024], "g_norm_swish_gate": [256]}
    assert {name: list(layer.get_submodule(name).weight.shape) for name in expected} == expected


@every_layer
@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 9])
def test_prefill_then_steps(name: str, prompt: int) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, final = layer(x, output_final_state=True)
    y, state = layer(x[:, :prompt], output_final_state=True)
    rows = [y]
    for t in range(prompt, x.shape[1]):
        y, state = layer.step(x[:, t], state)
        rows.append(y[:, None])
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-10, atol=1e-10)
    assert_same_state(state, final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "multi_query"])
def test_prefill_in_two_parts(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, final = layer(x, layer.initial_state(2), output_final_state=True)
    first, state = layer(x[:, :2], output_final_state=True)
    second, state = layer(x[:, 2:], state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-10, atol=1e-10)
    assert_same_state(state, final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_state(dtype: torch.dtype) -> None:
    state = make_layer("multi_query", dtype).initial_state(3)
    recurrent_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(state.recurrent, torch.zeros(3, 1, 2, 4, dtype=recurrent_dtype))
    assert state.recurrent.dtype == recurrent_dtype
    assert [list(inputs.shape) for inputs in state.conv] == [[3, 3, 8], [3, 3, 2], [3, 3, 4]]
    assert all(inputs.dtype == dtype and not inputs.any() for inputs in state.conv)
    assert make_layer("plain").initial_state(3).conv is None


class LoRA(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Int8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale)


@pytest.mark.parametrize("wrapper", [LoRA, Int8Linear])
def test_projections_may_be_other_modules(wrapper: type[nn.Module]) -> None:
    layer = make_layer("conv", torch.float32)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
        setattr(layer, name, wrapper(getattr(layer, name)))
    x = torch.randn(2, 5, 16)
    y, state = layer(x, layer.initial_state(2), output_final_state=True)
    torch.testing.assert_close(y, layer(x)[0])
    assert (state.recurrent.dtype, state.conv[0].dtype) == (torch.float32, torch.float32)


def test_initial_state_of_a_layer_without_floating_parameters() -> None:
    layer = GatedLinearAttention(**SMALL, use_short_conv=True)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).data = parameter.to(torch.int8)
    state = layer.initial_state(2, device="meta")
    assert {(t.dtype, t.device.type) for t in (state.recurrent, *state.conv)} == {(torch.float32, "meta")}


def test_fsdp2_with_mixed_precision() -> None:
    import torch.distributed as dist  # half a second that only this test needs
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


def test_a_saved_state_is_loaded_without_unpickling_code() -> None:
    layer = make_layer("conv")
    _, state = layer(torch.randn(2, 5, 16, dtype=torch.float64), output_final_state=True)
    file = io.BytesIO()
    torch.save({"layer": layer.state_dict(), "state": state, "plain": GLAState(state.recurrent)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["state"], GLAState)
    assert_same_state(loaded["state"], state, rtol=0, atol=0)
    assert loaded["plain"].conv is None
    layer.load_state_dict(loaded["layer"])


def test_device_and_dtype() -> None:
    layer = GatedLinearAttention(**SMALL, use_short_conv=True, conv_bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("use_output_gate", [False, True])
def test_reset_parameters_does_what_the_constructor_does(by_module: bool, use_output_gate: bool) -> None:
    options = {**SMALL, "use_short_conv": True, "conv_bias": True, "use_output_gate": use_output_gate}
    torch.manual_seed(1)
    expected = GatedLinearAttention(**options)
    layer = GatedLinearAttention(**options, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.detach().fill_(float("nan"))
    torch.manual_seed(1)
    if by_module:  # as the initialisers of FSDP do
        for module in layer.modules():
            if module is not layer and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        layer.reset_parameters()
    torch.testing.assert_close(dict(layer.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)


def test_step_leaves_its_state_alone_and_needs_no_gradient() -> None:
    layer = make_layer("conv")
    state = layer.initial_state(2)
    before = copy.deepcopy(state)
    y, after = layer.step(torch.randn(2, 16, dtype=torch.float64, requires_grad=True), state)
    assert_same_state(state, before, rtol=0, atol=0)
    assert not any(t.requires_grad for t in (y, after.recurrent, *after.conv))


@pytest.mark.parametrize("name", ["plain", "grouped", "conv_bias", "multi_query", "conv_of_one"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_separate(name: str, dtype: torch.dtype) -> None:
    layer = make_layer(name)
    lengths = [3, 0, 70, 1, 2]
    parts = [torch.randn(1, n, 16, dtype=torch.float64) for n in lengths]
    _, before = layer(torch.randn(5, 6, 16, dtype=torch.float64), output_final_state=True)
    y, state = layer(torch.cat(parts, dim=1), before, True, pack(*lengths).to(dtype))
    for i, (part, row) in enumerate(zip(parts, y.split(lengths, dim=1), strict=True)):
        own = GLAState(before.recurrent[i : i + 1], before.conv and tuple(t[i : i + 1] for t in before.conv))
        expected, after = layer(part, own, output_final_state=True)
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)
        own = GLAState(state.recurrent[i : i + 1], state.conv and tuple(t[i : i + 1] for t in state.conv))
        assert_same_state(own, after, rtol=1e-10, atol=1e-10)


def test_packed_without_state_then_steps() -> None:
    layer = make_layer("conv_bias")
    lengths = [1, 0, 7]
    sequences = torch.randn(3, 10, 16, dtype=torch.float64)
    packed = torch.cat([sequence[:n] for sequence, n in zip(sequences, lengths, strict=True)])
    _, state = layer(packed[None], output_final_state=True, cu_seqlens=pack(*lengths))
    for t in range(3):
        y, state = layer.step(torch.stack([s[n + t] for s, n in zip(sequences, lengths, strict=True)]), state)
    expected = torch.cat([layer(s[None, : n + 3])[0][:, -1] for s, n in zip(sequences, lengths, strict=True)])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_packed_gradients() -> None:
    layer = make_layer("multi_query")
    lengths = [5, 0, 2, 12]
    x = torch.randn(1, 19, 16, dtype=torch.float64)
    dy = torch.randn_like(x)
    grads = torch.autograd.grad(layer(x, cu_seqlens=pack(*lengths))[0], list(layer.parameters()), dy)
    separate = torch.cat([layer(part)[0] for part in x.split(lengths, dim=1)], dim=1)
    expected = torch.autograd.grad(separate, list(layer.parameters()), dy)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
@pytest.mark.parametrize("offsets", [[0, 3, 3, 5], [2, 2, 6], [0], [4]])
def test_tokens_outside_the_offsets_touch_nothing(name: str, offsets: list[int]) -> None:
    layer = make_layer(name)
    begin, end = offsets[0], offsets[-1]
    x = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    state = layer.initial_state(len(offsets) - 1)
    y, after = layer(x, state, True, torch.tensor(offsets))
    expected, expected_after = layer(x[:, begin:end], state, True, torch.tensor(offsets) - begin)
    torch.testing.assert_close(y[:, begin:end], expected)
    assert_same_state(after, expected_after)
    assert not y[:, :begin].any()
    assert not y[:, end:].any()
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    grads = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, wanted, dy[:, begin:end]))


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [0, 9], [1, 8], [-1, 8]])
def test_bad_offsets_are_refused_by_name(
    offsets: list[int], fresh_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLA_CHECK", "1")
    gla.reload_environment()
    layer = make_layer("conv_bias")
    with pytest.raises(ValueError, match=r"cu_seqlens is \[.*\]; expected offsets that rise from 0"):
        layer(torch.randn(1, 8, 16, dtype=torch.float64), cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("name", ["plain", "conv"])
def test_no_tokens_and_no_sequences(name: str) -> None:
    layer = make_layer(name)
    y, state = layer(torch.zeros(2, 0, 16, dtype=torch.float64), output_final_state=True)
    assert y.shape == (2, 0, 16)
    assert_same_state(state, layer.initial_state(2), rtol=0, atol=0)
    for x, cu_seqlens in ((torch.zeros(0, 5, 16), None), (torch.zeros(1, 0, 16), torch.tensor([0]))):
        y, state = layer(x.double(), output_final_state=True, cu_seqlens=cu_seqlens)
        assert y.shape == x.shape
        assert_same_state(state, layer.initial_state(0), rtol=0, atol=0)


def test_packed_reads_no_value_on_the_host() -> None:
    layer = make_layer("conv_bias")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # raises wherever a value is asked for
        cu_seqlens = mode.from_tensor(pack(2, 5))
        y, state = layer(torch.empty(1, 7, 16, dtype=torch.float64), output_final_state=True, cu_seqlens=cu_seqlens)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            cu_seqlens.tolist()
    assert y.shape == (1, 7, 16)
    assert [list(inputs.shape) for inputs in state.conv] == [[2, 2, 8], [2, 2, 8], [2, 2, 16]]


@pytest.mark.parametrize(
    ("name", "dtype", "dynamic", "backend"),
    [
        ("conv_bias", torch.float32, False, "aot_eager"),
        ("plain", torch.bfloat16, False, "aot_eager"),
        ("multi_query", torch.bfloat16, True, "eager"),  # aot_eager takes seconds over sizes that are not known
    ],
)
def test_compile(name: str, dtype: torch.dtype, dynamic: bool, backend: str) -> None:
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


def test_compile_packed_with_state_and_step() -> None:
    torch._dynamo.reset()
    layer = make_layer("conv_bias")
    forward, step = (
        torch.compile(f, fullgraph=True, backend="eager", dynamic=True) for f in (layer.forward, layer.step)
    )
    # Sizes unlike any of the layer's: the compiler takes equal sizes for the same size.
    for i, lengths in enumerate([(2, 1, 0, 3, 5), (1, 1, 9, 0, 2, 6)]):
        x = torch.randn(1, sum(lengths), 16, dtype=torch.float64)
        token = torch.randn(len(lengths), 16, dtype=torch.float64)
        before = layer.initial_state(len(lengths))
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            y, state = forward(x, before, True, pack(*lengths))
            y1, state1 = step(token, state)
        expected_y, expected = layer(x, before, True, pack(*lengths))
        expected_y1, expected1 = layer.step(token, expected)
        torch.testing.assert_close((y, y1), (expected_y, expected_y1))
        assert_same_state(state, expected)
        assert_same_state(state1, expected1)


@every_layer
def test_bfloat16(name: str) -> None:
    layer = make_layer(name, torch.bfloat16)
    x = torch.randn(2, 70, 16, dtype=torch.bfloat16)
    expected = evaluate(layer, LAYERS[name], x)
    y, state = layer(x[:, :69], output_final_state=True)
    last, state = layer.step(x[:, 69], state)
    assert (y.dtype, last.dtype, state.recurrent.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    y = torch.cat([y, last[:, None]], dim=1)
    assert (y - expected).norm() < 0.02 * expected.norm()


def test_log_gate_is_float32_in_bfloat16() -> None:
    layer = make_layer("plain", torch.bfloat16)
    with torch.no_grad():
        layer.gk_proj[1].weight.zero_()
        layer.gk_proj[1].bias.fill_(8.0)
    g = layer._op_inputs(torch.randn(1, 3, 16, dtype=torch.bfloat16), None)[3]
    torch.testing.assert_close(g, torch.full((1, 3, 2, 4), -3.3540637289566e-4 / 16), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["plain", "conv_bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_autocast(name: str, dtype: torch.dtype, tolerance: float, device: str) -> None:
    layer = make_layer(name, torch.float32).to(device)
    lengths = [12, 5]
    sequences = torch.randn(2, 24, 16).to(device)  # the same on every device
    pieces = [s.split([n, 7, 1, 16 - n]) for s, n in zip(sequences, lengths, strict=True)]  # packed, batched, a step
    packed, more, token = (torch.cat([piece[i] for piece in pieces]) for i in range(3))
    with torch.autocast(device, dtype):
        y, state = layer(packed[None], None, True, pack(*lengths).to(device))
        y_more, state = layer(more.view(2, 7, 16), state, True)
        y_token, after = layer.step(token, state)
    assert (y.dtype, y_more.dtype, y_token.dtype) == (dtype, dtype, dtype)
    assert (state.recurrent.dtype, after.recurrent.dtype) == (torch.float32, torch.float32)
    ys = torch.cat([torch.cat(parts) for parts in zip(y[0].split(lengths), y_more, y_token[:, None], strict=True)])
    expected = torch.cat(
        [evaluate(layer, LAYERS[name], s[None, : n + 8])[0] for s, n in zip(sequences, lengths, strict=True)]
    )
    assert (ys - expected).norm() < tolerance * expected.norm()

    differentiable = torch.cat([torch.arange(n + 8) < n + 7 for n in lengths])  # all but the steps
    dy = torch.randn(expected.shape).to(device)[differentiable]
    grads, expected_grads = (
        torch.autograd.grad(out[differentiable], list(layer.parameters()), dy.to(out.dtype)) for out in (ys, expected)
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - expected_grad).norm() < 2 * tolerance * expected_grad.norm()


def test_the_request_reaches_every_op() -> None:
    layer = GatedLinearAttention(**SMALL, backend="reference")
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
def test_a_bad_request_is_found_at_construction(backend: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        GatedLinearAttention(**SMALL, backend=backend)


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
        ({"gate_logit_normalizer": 0}, "gate_logit_normalizer is 0; expected a number above 0"),
        ({"clamp_min": 0.5}, "clamp_min is 0.5; expected at most 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(**{**SMALL, **options})


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
def test_bad_input(name: str, x: object, cu_seqlens: Tensor | None, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_layer(name, torch.float32)(x, cu_seqlens=cu_seqlens)


def test_bad_states() -> None:
    plain, conv = make_layer("plain"), make_layer("conv")
    x = torch.zeros(2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x has shape \[2, 1, 16\]; expected \[B, hidden_size\]"):
        plain.step(x[:, None], plain.initial_state(2))
    with pytest.raises(ValueError, match=r"state.recurrent has shape \[3, 2, 4, 8\]; .* with N=2, H=2, K=4, V=8"):
        plain.step(x, plain.initial_state(3))
    with pytest.raises(TypeError, match="state is Tensor; expected a GLAState"):
        plain.step(x, plain.initial_state(2).recurrent)
    with pytest.raises(ValueError, match=r"state.conv holds none .* expected some, as use_short_conv is True"):
        conv.step(x, plain.initial_state(2))
    with pytest.raises(ValueError, match=r"state.conv holds some .* expected none, as use_short_conv is False"):
        plain(x[:, None], conv.initial_state(2))
    state = conv.initial_state(2)
    short = state._replace(conv=(state.conv[0], state.conv[1][:, 1:], state.conv[2]))
    with pytest.raises(ValueError, match=r"state.conv of k has shape \[2, 2, 8\]; .* with N=2, conv_size-1=3, width=8"):
        conv(x[:, None], short)
