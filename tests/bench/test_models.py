"""The table of published models: its rows, their arguments, floors and predictions, and `gla bench --models`."""

import statistics

import pytest
import torch
from typer.testing import CliRunner

from gla_core.bench import measure, models
from gla_core.bench.models import WAYS, floor_seconds, make_call, op_calls, output_of
from gla_core.dispatch.calibration import KNOWN_DEVICES
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.workloads import model_inputs
from gla_core.workloads.models import FUNCTIONS, MODELS, SCAN, SEQUENCES, distinct, reduced
from gla_tools.command import app

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BANDWIDTH = 4.23e12  # of a copy on an H200
NAMED = {model.name: model for model in MODELS}
rows = pytest.mark.parametrize("model", distinct(), ids=lambda model: model.name)


def test_names_are_unique_and_sources_are_named():
    assert len(NAMED) == len(MODELS)
    assert all(model.source.count("/") >= 1 and model.function in FUNCTIONS for model in MODELS)
    tokens = {model.sizes["B"] * model.sizes["T"] for model in MODELS}
    assert tokens <= {8192, 16384, 32768}


def test_equal_calls_are_measured_once():
    calls = [(model.function, tuple(model.sizes.items())) for model in distinct()]
    assert len(set(calls)) == len(calls) == len({(m.function, tuple(m.sizes.items())) for m in MODELS})
    assert sorted(name for model in distinct() for name in model.name.split(", ")) == sorted(NAMED)
    assert "Nemotron-H 47B, Nemotron-H 56B" in [model.name for model in distinct()]


# ---- values


def attention(q, k, v, g):
    """The sum over s <= t of (q_t . exp(b_t - b_s) k_s) v_s, with b the sum of g [B, T, Hv, K]."""
    Hv = max(q.shape[2], v.shape[2])
    q, k, v, g = (x.repeat_interleave(Hv // x.shape[2], 2) for x in (q, k, v, g))
    b = g.cumsum(1)
    scores = torch.einsum("bthk,bthsk,bshk->bhts", q, (b[:, :, :, None] - b.transpose(1, 2)[:, None]).exp(), k)
    return torch.einsum("bhts,bshv->bthv", scores.tril(), v)


def delta_rule(q, k, v, g, beta):
    """The recurrence, with unit queries and keys, and gates g [B, T, Hv, K]."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S, o = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        S = g[:, t].exp()[..., None] * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1)


def expected(model, x):
    """Returns the output of a model's function, as its paper defines it."""
    if model.function == SCAN:
        dt = torch.nn.functional.softplus(x["dt"] + x["dt_bias"])
        g = (dt * x["A"])[..., None].expand(*dt.shape, model.sizes["K"])
        return attention(x["C"], x["B"], dt[..., None] * x["x"], g) + x["D"][:, None] * x["x"]
    q, k, v = x.get("q", x.get("r")), x["k"], x["v"]
    scale = q.shape[-1] ** -0.5
    if model.function == "chunk_linear_attn":
        return attention(q, k, v, 0 * k) / (q * k.cumsum(1)).sum(-1, keepdim=True)
    if model.function == "chunk_lightnet":
        z = torch.logcumsumexp(k, 1)
        return scale * attention(q * (-z).exp(), k.exp(), v, 0 * k)
    if model.function == "chunk_gsa":
        into_slots = [attention(q, k, x["s"][..., m : m + 1], x["g"][..., m : m + 1].expand_as(k)) for m in range(8)]
        return attention((scale * torch.cat(into_slots, -1)).softmax(-1), x["s"], v, x["g"])
    if model.function == "chunk_rwkv6":
        before = torch.cat([torch.zeros_like(k[:, :1]), x["w"][:, :-1]], 1)  # the state before a token
        past = attention(q[:, 1:], k[:, :-1], v[:, :-1], before[:, 1:])
        return scale * (torch.nn.functional.pad(past, (0, 0, 0, 0, 1, 0)) + (q * x["u"] * k).sum(-1, keepdim=True) * v)
    if FUNCTIONS[model.function].is_delta_rule:
        g = x.get("g", torch.zeros_like(x["beta"]))
        g = (g if g.ndim == 4 else g[..., None]).expand(*v.shape[:3], k.shape[-1])
        return scale * delta_rule(q, k, v, g, x["beta"])
    if model.function == "chunk_retention":
        g = (1 - 2.0 ** (-5 - torch.arange(k.shape[2]).double())).log()
    else:
        g = x.get("g", x.get("g_gamma"))
    g = g if g.ndim == 4 else (g[..., None] if g.ndim == 3 else g[None, None, :, None])
    return scale * attention(q, k, v, g.expand(*v.shape[:3], k.shape[-1]))


@rows
def test_a_call_computes_the_model(model):
    model = reduced(model, T=6)
    x = model_inputs.arguments(model, CPU, torch.float64)
    out = output_of(make_call(model, "forward", "gla-core", CPU, dtype=torch.float64)())
    made = {**x, "out": out}
    assert {name: tuple(value.shape) for name, value in made.items()} == model_inputs.shapes(model)
    torch.testing.assert_close(out, expected(model, x), rtol=1e-9, atol=1e-9)
    gradients = make_call(model, "forward and backward", "gla-core", CPU, dtype=torch.float64)()
    assert [y.shape for y in gradients] == [y.shape for name, y in x.items() if name not in model_inputs.CONSTANTS]


@rows
def test_a_step_continues_the_call(model):
    """A step from a state is the call over one token that begins with it."""
    model = reduced(model)
    x = model_inputs.step_arguments(model, CPU, torch.float64)
    token = model_inputs.arguments(model.resized(B=SEQUENCES, T=1), CPU, torch.float64)
    states = {"initial_states": x["state"].clone()} if model.function == SCAN else {"initial_state": x["initial_state"]}
    function, options = models._function(model, "gla-core", step=False), model_inputs.OPTIONS.get(model.function, {})
    out = output_of(function(**token, **options, **states))
    step = output_of(make_call(model, "step", "gla-core", CPU, dtype=torch.float64)())
    torch.testing.assert_close(step.reshape(out.shape), out)


def test_inputs_are_those_of_layers():
    x = model_inputs.arguments(reduced(NAMED["Mamba-2 2.7b"], T=2000), CPU, torch.float32)
    dt = torch.nn.functional.softplus(x["dt"] + x["dt_bias"])
    assert -16 <= x["A"].min() <= x["A"].max() <= -1
    assert 1e-3 < dt.median() < 0.1
    gates = model_inputs.arguments(reduced(NAMED["GLA 1.3B"]), CPU, torch.bfloat16)["g"]
    assert gates.dtype == torch.float32
    assert -0.5 < gates.min() <= gates.max() < 0
    assert model_inputs.arguments(NAMED["MiniMax-01"].resized(T=1), CPU, torch.float32)["g_gamma"][-1] == -(2.0**-8)


def test_a_peer_receives_repeated_heads(monkeypatch):
    received = {}
    monkeypatch.setattr(models, "_function", lambda model, who, step: lambda **x: received.setdefault(who, x))
    for who in ("fla", "gla-core"):
        make_call(reduced(NAMED["GLA 7B"]), "forward", who, CPU)()
    assert [received[who]["k"].shape[2] for who in ("fla", "gla-core")] == [4, 2]
    assert received["fla"]["q"].shape == received["gla-core"]["q"].shape


# ---- floors


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [("RetNet 1.3B", 0.095), ("GLA 1.3B", 0.063), ("GLA 2.7B of 4 heads", 0.040), ("Falcon-H1 7B", 0.051),
     ("Falcon-H1 34B", 0.036), ("Mamba-2 2.7b", 0.081), ("Zamba2 7B", 0.056), ("Granite-4 small", 0.257),
     ("Nemotron-H 8B", 0.142), ("simple GLA 1.3B", 0.063), ("Qwen3-Next 80B", 0.096), ("Kimi-Linear 48B", 0.191)],
)  # fmt: skip
def test_bytes_of_a_forward_take_what_was_counted_by_hand(name, milliseconds, monkeypatch):
    monkeypatch.setattr(models, "PRODUCTS", float("inf"))
    assert 1e3 * floor_seconds(NAMED[name], "forward", BANDWIDTH) == pytest.approx(milliseconds, rel=0.02)


def test_bytes_of_a_pair_and_of_a_step(monkeypatch):
    monkeypatch.setattr(models, "PRODUCTS", float("inf"))
    gla = NAMED["GLA 2.7B of 4 heads"]
    assert 1e3 * floor_seconds(gla, "forward and backward", BANDWIDTH) == pytest.approx(0.109, rel=0.01)
    states = SEQUENCES * 4 * 320 * 640 * 4
    assert floor_seconds(gla, "step", 1.0) == 2 * states + SEQUENCES * 4 * (2 * 320 * 2 + 2 * 640 * 2 + 320 * 4)


def test_products_are_those_of_chunks_of_64():
    tokens, C = 16384, 64
    falcon = tokens * (24 * (4 * 256 * 128 + 2 * C * 128) + 2 * C * 256)  # heads of a group share their scores
    assert floor_seconds(NAMED["Falcon-H1 7B"], "forward", float("inf")) == pytest.approx(falcon / 700e12)
    gla = tokens * 4 * (4 * 256 * 512 + 2 * C * (256 + 512))
    assert floor_seconds(NAMED["GLA 1.3B"], "forward", float("inf")) == pytest.approx(gla / 700e12)
    assert floor_seconds(NAMED["GLA 1.3B"], "backward", float("inf")) == pytest.approx(2 * gla / 700e12)
    grouped = tokens * (8 * 2 * 128 * 128 + 32 * (2 * 128 * 128 + 2 * C * 256))
    assert floor_seconds(NAMED["GLA 7B"], "forward", float("inf")) == pytest.approx(grouped / 700e12)
    qwen = tokens * (32 * (6 * 128 * 128 + 4 * C * 128) + 16 * 4 * C * 128)  # value heads of a group share scores
    assert floor_seconds(NAMED["Qwen3-Next 80B"], "forward", float("inf")) == pytest.approx(qwen / 700e12)
    kimi = tokens * 32 * (6 * 128 * 128 + 4 * C * (128 + 128))
    assert floor_seconds(NAMED["Kimi-Linear 48B"], "forward", float("inf")) == pytest.approx(kimi / 700e12)
    slots = tokens * 5 * (2 * 4 * 512 * 64 + 2 * 2 * C * (512 + 64))
    assert floor_seconds(NAMED["GSA 2.7B"], "forward", float("inf")) == pytest.approx(slots / 700e12)


def test_a_floor_is_the_larger_of_two_times():
    model = NAMED["Falcon-H1 7B"]
    both = floor_seconds(model, "forward", BANDWIDTH)
    assert both == max(
        floor_seconds(model, "forward", float("inf")), floor_seconds(model.resized(K=8), "forward", 1e30)
    )
    pair = sum(floor_seconds(model, way, BANDWIDTH) for way in ("forward", "backward"))
    assert floor_seconds(model, "forward and backward", BANDWIDTH) == pair


# ---- predictions


def test_every_call_has_a_prediction_above_its_floor():
    """Prints, with -s, the predicted times of the calls on an H200 as multiples of their floors."""
    assumed = KNOWN_DEVICES["NVIDIA H200"]
    for way in ("forward", "backward", "step"):
        floors = {}
        for model in distinct():
            seconds = 0.0
            for call in op_calls(model, way, CUDA, assumed=assumed, capturing=True):
                explanation = explain_call(call, current_request(None))
                (predicted,) = [c.seconds for c in explanation.candidates if c.name == explanation.winner]
                seconds += predicted
            floors[model.name] = seconds / floor_seconds(model, way, BANDWIDTH)
        assert min(floors.values()) > 0.9, min(floors, key=floors.__getitem__)
        middle, worst = statistics.median(floors.values()), max(floors.values())
        above = ", ".join(f"{name} {each:.1f}" for name, each in floors.items() if each > 6)
        print(f"{way}: median {middle:.2f}, worst {worst:.1f}; above 6: {above}")


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_published_models_take_hoppers_kernels(way):
    """Checks the calls that layers make, which have no checkpoints, for example."""
    for model in distinct():
        for call in op_calls(model, way, CUDA, assumed=KNOWN_DEVICES["NVIDIA H200"], capturing=True):
            kernel = explain_call(call, current_request(None)).candidates[0].kernels[0]
            wide = ("Gated DeltaNet 1.3B", "OLMo-Hybrid 7B")  # whose gradients, but those of states, are general
            is_general = way == "backward" and model.name in wide
            assert ("sm90" in kernel, "general" in kernel) == (True, is_general), (model.name, kernel)


# ---- gla bench --models


def run(monkeypatch, *arguments):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    return CliRunner().invoke(app, ["bench", "--models", "--device", "cpu", "--seconds", "0.001", *arguments])


def test_the_command_times_the_calls_of_models(monkeypatch):
    result = run(monkeypatch, "--workload", "GLA 1.3B", "--workload", "Zamba2 7B")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if " us" in line or " ms" in line]
    assert len(lines) == 2 * len(WAYS)
    timed = {name for name in NAMED for line in lines if line.strip().startswith(f"{name} ")}
    assert timed == {"GLA 1.3B", "Zamba2 7B"}


def test_a_call_that_fails_is_said(monkeypatch):
    monkeypatch.setattr(models, "make_call", lambda *_: (_ for _ in ()).throw(RuntimeError("no such sizes")))
    result = run(monkeypatch, "--workload", "GLA 1.3B")
    assert result.exit_code == 1
    assert "GLA 1.3B, forward, gla-core: RuntimeError: no such sizes" in result.output


def test_what_does_not_go_together_is_refused(monkeypatch):
    result = run(monkeypatch, "--op", "chunk_gla")
    assert (result.exit_code, "--op does not go with --models" in result.output) == (2, True)
    result = run(monkeypatch, "--workload", "GLA 1.3b")
    assert (result.exit_code, "unknown model 'GLA 1.3b'" in result.output) == (2, True)
