"""The layers with delta rules against a direct evaluation in float64, one token at a time."""

import pytest
import torch
import torch.nn.functional as F

from gla_core.conformance import oracle
from gla_core.nn import DeltaNet, GatedDeltaNet, KimiDeltaAttention

LAYERS = {
    "kda": (KimiDeltaAttention, {"head_dim": 4, "num_heads": 2}),
    "kda_groups": (
        KimiDeltaAttention,
        {"head_dim": 4, "num_heads": 1, "num_v_heads": 3, "expand_v": 1.5, "allow_neg_eigval": True, "norm_eps": 0.1},
    ),
    "kda_bounded": (
        KimiDeltaAttention,
        {"head_dim": 4, "num_heads": 2, "use_short_conv": False, "safe_gate": True, "lower_bound": -5.0},
    ),
    "gdn": (GatedDeltaNet, {"head_dim": 4, "num_heads": 2, "num_v_heads": 4, "conv_bias": True, "conv_size": 3}),
    "gdn_sigmoid": (
        GatedDeltaNet,
        {"head_dim": 4, "num_heads": 2, "output_gate_activation": "sigmoid", "allow_neg_eigval": True},
    ),
    "gdn_no_gate": (GatedDeltaNet, {"head_dim": 4, "num_heads": 2, "use_gate": False, "use_short_conv": False}),
    "delta": (DeltaNet, {"num_heads": 2}),
    "delta_gate": (
        DeltaNet,
        {"num_heads": 2, "expand_k": 0.5, "use_gate": True, "allow_neg_eigval": True, "qk_activation": "elu"}
        | {"qk_norm": "sum"},
    ),
    "delta_no_beta": (
        DeltaNet,
        {"num_heads": 2, "use_beta": False, "use_short_conv": False, "qk_activation": "identity"},
    ),
    "delta_relu": (DeltaNet, {"num_heads": 4, "use_beta": False, "allow_neg_eigval": True, "qk_activation": "relu"}),
}
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "elu": lambda x: F.elu(x) + 1, "identity": lambda x: x}


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


def make(name, dtype=torch.float64):
    """Returns a small layer; every parameter is random."""
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(16, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def convolved(x, p, name):
    weight = p.get(f"{name}_conv1d.weight")
    if weight is None:
        return x
    W = weight.shape[-1]
    padded = F.pad(x, (0, 0, W - 1, 0))
    y = sum(weight[:, 0, i] * padded[:, i : i + x.shape[1]] for i in range(W))
    return y + p.get(f"{name}_conv1d.bias", 0)


def low_rank(x, p, name):
    y = x @ p[f"{name}_proj.0.weight"].T @ p[f"{name}_proj.1.weight"].T
    return y + p.get(f"{name}_proj.1.bias", 0)


def evaluate(layer, name, x):
    """Returns y for x [B, T, 16], and the state after it, from the parameters by their names in FLA."""
    kind, options = LAYERS[name]
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    H, Hv = options["num_heads"], options.get("num_v_heads", options["num_heads"])
    q, k, v = (convolved(x @ p[f"{n}_proj.weight"].T, p, n) for n in "qkv")
    activation = ACTIVATIONS[options.get("qk_activation", "silu")]
    q, k, v = (activation(q).unflatten(-1, (H, -1)), activation(k).unflatten(-1, (H, -1)), F.silu(v))
    v = v.unflatten(-1, (Hv, -1))
    if options.get("qk_norm") == "sum":
        q, k = (y / y.abs().sum(-1, keepdim=True) for y in (q, k))
    else:
        q, k = (y / torch.sqrt((y**2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    beta = 1 / (1 + torch.exp(-(x @ p["b_proj.weight"].T))) if "b_proj.weight" in p else x.new_ones(*x.shape[:2], Hv)
    beta = 2 * beta if options.get("allow_neg_eigval") else beta
    g, gate = None, None
    if kind is KimiDeltaAttention:
        logits, A = (low_rank(x, p, "f") + p["dt_bias"]).unflatten(-1, (Hv, -1)), p["A_log"].exp()[:, None]
        bound = options.get("lower_bound")
        g = -A * torch.log(1 + logits.exp()) if bound is None else bound / (1 + torch.exp(-A * logits))
        gate = torch.sigmoid(low_rank(x, p, "g"))
    elif kind is GatedDeltaNet:
        g = -p["A_log"].exp() * torch.log(1 + torch.exp(x @ p["a_proj.weight"].T + p["dt_bias"]))
    if "g_proj.weight" in p:
        sigmoid = options.get("output_gate_activation") == "sigmoid"
        gate = (torch.sigmoid if sigmoid else F.silu)(x @ p["g_proj.weight"].T)
    o, state = oracle.chunk_delta(q, k, v, g, beta)
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + options.get("norm_eps", 1e-5)) * p["o_norm.weight"]
    return (o.flatten(-2) * (1 if gate is None else gate)) @ p["o_proj.weight"].T, state


@pytest.mark.parametrize("T", [1, 40])
def test_values_and_gradients(T, name):
    layer, x = make(name), torch.randn(2, T, 16, dtype=torch.float64, requires_grad=True)
    y, state = layer(x, output_final_state=True)
    expected, S = evaluate(layer, name, x)
    torch.testing.assert_close((y, state.recurrent), (expected, S), rtol=1e-9, atol=1e-9)
    wanted, dy = [x, *layer.parameters()], torch.randn_like(y)
    gradients = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, wanted, dy), rtol=1e-8, atol=1e-8)
    for (of, _), gradient in zip(layer.named_parameters(), gradients[1:], strict=True):
        assert T == 1 or gradient.any(), of  # the first token forgets nothing


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_lower_precision(dtype, tolerance, name):
    layer, x = make(name, dtype), torch.randn(2, 40, 16).to(dtype)
    with torch.no_grad():
        y, state = layer(x[:, :39], output_final_state=True)
        last, state = layer.step(x[:, 39], state)
    assert (y.dtype, last.dtype, state.recurrent.dtype) == (dtype, dtype, torch.float32)
    expected, _ = evaluate(layer, name, x.double())
    assert (torch.cat([y, last[:, None]], 1) - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("name", ["kda_bounded", "gdn", "delta"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding(dtype, name):
    """The logits of its gates are finite: a gradient of A_log would multiply them by 0."""
    layer, x = make(name, dtype), torch.randn(2, 5, 16).to(dtype)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    y, state = layer(x, output_final_state=True, attention_mask=mask)
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    for i, tokens in enumerate(mask.bool()):
        alone, after = layer(x[i : i + 1, tokens], output_final_state=True)
        torch.testing.assert_close(y[i, tokens], alone[0], rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(state.recurrent[i], after.recurrent[0], rtol=2e-3, atol=1e-4)
    assert not y[mask == 0].any()


def test_initial_values():
    torch.manual_seed(1)
    layer, gated = KimiDeltaAttention(16, head_dim=4, num_heads=200), GatedDeltaNet(16, head_dim=1, num_heads=400)
    for dt in (F.softplus(layer.dt_bias), F.softplus(gated.dt_bias)):
        assert 0.00099 < dt.min() < 0.0012
        assert 0.09 < dt.max() < 0.1001
    assert 0.999 < layer.A_log.exp().min() < 2
    assert gated.A_log.exp().min() < 1
    assert 15 < layer.A_log.exp().max() < 16.01
    bounded = KimiDeltaAttention(16, head_dim=4, num_heads=4, safe_gate=True, lower_bound=-5.0, device="meta")
    bounded = bounded.to_empty(device="cpu")
    bounded.reset_parameters()
    assert not bounded.A_log.any()
    assert bounded.dt_bias.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (KimiDeltaAttention, {"num_heads": 0}, "num_heads is 0; expected a whole number, at least 1"),
        (
            KimiDeltaAttention,
            {"num_heads": 4, "num_v_heads": 6},
            "num_v_heads is 6; expected a multiple of num_heads = 4",
        ),
        (
            KimiDeltaAttention,
            {"num_heads": 4, "num_v_heads": 2},
            "num_v_heads is 2; expected a multiple of num_heads = 4",
        ),
        (GatedDeltaNet, {"head_dim": 5, "expand_v": 1.5}, r"head_dim \* expand_v is 7.5; expected a whole number"),
        (KimiDeltaAttention, {"lower_bound": 0.0}, "lower_bound is 0.0; expected a number below 0"),
        (KimiDeltaAttention, {"safe_gate": True}, "safe_gate is True and lower_bound is None; expected a lower bound"),
        (GatedDeltaNet, {"output_gate_activation": "swich"}, "unknown gate_fn 'swich'; did you mean 'swish'"),
        (GatedDeltaNet, {"mode": "chunks"}, "unknown mode 'chunks'; did you mean 'chunk'"),
        (GatedDeltaNet, {"backend": "a b"}, "cannot read 'a b'"),
        (DeltaNet, {"qk_activation": "tanh"}, "unknown qk_activation 'tanh'"),
        (DeltaNet, {"qk_norm": "l1"}, "unknown qk_norm 'l1'; did you mean 'l2'"),
        (DeltaNet, {"num_heads": 3}, r"hidden_size \* expand_k is 16; expected a multiple of num_heads = 3"),
        (DeltaNet, {"conv_size": 0}, "conv_size is 0; expected a whole number, at least 1"),
    ],
)
def test_wrong_arguments(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(16, **options)


def test_parameters_are_named_as_in_flash_linear_attention():
    """Their order is the same too."""
    names = {kind: [name for name, _ in kind(16, num_heads=2, conv_bias=True).named_parameters()] for kind in NAMES}
    assert names == NAMES
    assert KimiDeltaAttention(64).state_shape == (16, 128, 128)
    assert GatedDeltaNet(64).state_shape == (6, 256, 512)
    assert DeltaNet().state_shape == (4, 256, 256)
    layer = KimiDeltaAttention(16, head_dim=4, num_heads=2, num_v_heads=4, expand_v=1.5)
    assert layer.dt_bias.shape == layer.f_proj[1].weight.shape[:1] == (16,)
    assert layer.f_proj[0].weight.shape == layer.g_proj[0].weight.shape == (6, 16)


QKV = [f"{n}_proj.weight" for n in "qkv"]
CONVOLUTIONS = [f"{n}_conv1d.{p}" for n in "qkv" for p in ("weight", "bias")]
LOW_RANK = ["f_proj.0.weight", "f_proj.1.weight", "b_proj.weight"]
LOW_RANK_GATE = ["g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias"]
OUT = ["o_norm.weight", "o_proj.weight"]
NAMES = {
    KimiDeltaAttention: ["A_log", "dt_bias", *QKV, *CONVOLUTIONS, *LOW_RANK, *LOW_RANK_GATE, *OUT],
    GatedDeltaNet: ["A_log", "dt_bias", *QKV, "a_proj.weight", "b_proj.weight", *CONVOLUTIONS, "g_proj.weight", *OUT],
    DeltaNet: [*QKV, "b_proj.weight", *CONVOLUTIONS, *OUT],
}
