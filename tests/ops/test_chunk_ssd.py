"""chunk_ssd beside chunk_gla and operations around it, and what mamba_chunk_scan_combined computes by it."""

import pytest
import torch
import torch.nn.functional as F

import gla_core as gla
from gla_core.compat.mamba_ssm import mamba_chunk_scan_combined, ops

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 5


def inputs(*instances, dtype=torch.float64, gated=False):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "x": (B, T, HV, V),
        "dt": (B, T, HV),
        "A": (HV,),
        "D": (HV, V),
        "dt_bias": (HV,),
        "initial_state": (B, HV, K, V),
        **({"z": (B, T, HV, V)} if gated else {}),
    }
    x = {n: torch.randn(*instances, *shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    x["A"] = -x["A"].exp()
    return {n: y.to(torch.float32 if n in ("A", "initial_state") and dtype != y.dtype else dtype) for n, y in x.items()}


def by_chunk_gla(x, softplus, low, high):
    """Returns the results of chunk_ssd, by PyTorch's operations around chunk_gla."""
    delta = x["dt"] + x["dt_bias"]
    delta = (F.softplus(delta) if softplus else delta).clamp(low, high)
    v, g = x["x"] * delta[..., None], delta * x["A"]
    o, state = gla.chunk_gla(x["q"], x["k"], v, g, 1.0, x["initial_state"], True)
    o = o + x["D"] * x["x"]
    return o * F.silu(x["z"]) if "z" in x else o, state


def gradients(results, leaves):
    loss = sum((r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in results)
    return torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
@pytest.mark.parametrize("gated", [False, True])
def test_results_and_gradients_are_those_of_chunk_gla(softplus, limits, gated):
    x = {name: y.requires_grad_() for name, y in inputs(gated=gated).items()}
    options = {"dt_softplus": softplus, "dt_min": limits[0], "dt_max": limits[1]}
    actual = gla.chunk_ssd(**x, output_final_state=True, **options)
    expected = by_chunk_gla(x, softplus, *limits)
    torch.testing.assert_close(tuple(actual), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients(actual, x), gradients(expected, x), rtol=1e-11, atol=1e-11)


def test_limits_are_those_of_the_call_and_not_of_the_call_before():
    x = inputs()
    for limits in ((0.3, 0.9), (0.5, 0.6), (0.3, 0.9)):
        actual = gla.chunk_ssd(**x, dt_min=limits[0], dt_max=limits[1])
        torch.testing.assert_close(actual.o, by_chunk_gla(x, False, *limits)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gate_apart_from_the_op_is_that_of_the_op(dtype):
    """A gradient, here of z alone, separates them, and then o is rounded once more."""
    x = inputs(dtype=dtype, gated=True)
    in_op = gla.chunk_ssd(**x, dt_softplus=True).o
    x["z"].requires_grad_()
    apart = gla.chunk_ssd(**x, dt_softplus=True).o
    assert (in_op.requires_grad, apart.requires_grad) == (False, True)
    torch.testing.assert_close(apart, in_op, rtol=2 * torch.finfo(dtype).eps, atol=0)
    with torch.no_grad():
        assert torch.equal(gla.chunk_ssd(**x, dt_softplus=True).o, in_op)


def test_the_gate_of_rows_of_no_sequence_has_no_effect():
    x = {name: y[:1] if y.ndim > 2 else y for name, y in inputs(gated=True).items()}
    plain = [x.copy(), x.copy()]
    plain[1]["z"] = x["z"].clone()
    plain[1]["z"][:, 50:] = torch.nan
    gradients_of = []
    for y in plain:
        leaves = {name: z.clone().requires_grad_() for name, z in y.items()}
        o, state = gla.chunk_ssd(**leaves, output_final_state=True, cu_seqlens=torch.tensor([0, 50]))
        gradients_of.append(gradients((o, state), leaves))
        assert not o[:, 50:].any()
    torch.testing.assert_close(*gradients_of, rtol=0, atol=0)
    assert not gradients_of[1][list(x).index("z")][:, 50:].any()


def test_compiled_code_and_traces_compute_the_gradients_of_the_gate():
    def results(x):
        return tuple(gla.chunk_ssd(**x, dt_softplus=True, output_final_state=True))

    x = inputs(gated=True)
    compiled = torch.compile(results, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), results(x))
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    expected = gradients(results(leaves), leaves)
    torch.testing.assert_close(gradients(compiled(leaves), leaves), expected)
    traced = torch.jit.trace(lambda z: gla.chunk_ssd(**{**x, "z": z}).o, x["z"])
    torch.testing.assert_close(traced(leaves["z"]), gla.chunk_ssd(**x).o)
    assert traced(leaves["z"]).requires_grad


def test_the_torch_op_refuses_a_gradient_of_a_call_with_z():
    x = inputs(gated=True)
    rest = (True, 0.0, 1.0, x["initial_state"], True, None, None, x["z"].requires_grad_())
    o, *_ = torch.ops.gla.chunk_ssd_fwd(*(x[n] for n in ("q", "k", "x", "dt", "A", "D", "dt_bias")), *rest)
    with pytest.raises(RuntimeError, match="chunk_ssd_fwd has no gradient of a call with z; call chunk_ssd, whose"):
        o.sum().backward()


@pytest.mark.parametrize("gated", [False, True])
def test_vmap_gives_each_instance_rates_of_its_own(gated):
    def loss(x):
        o, state = gla.chunk_ssd(**x, dt_softplus=True, output_final_state=True)
        return o.square().sum() + state.pow(3).sum()

    x = inputs(3, gated=gated)
    together = torch.func.vmap(torch.func.grad(loss))(x)
    for i in range(3):
        alone = torch.func.grad(loss)({name: y[i] for name, y in x.items()})
        torch.testing.assert_close({name: y[i] for name, y in together.items()}, alone)


def test_vmap_shares_what_has_no_instances():
    x, one = inputs(3), inputs()
    together = torch.vmap(lambda y: gla.chunk_ssd(**{**one, "x": y}).o)(x["x"])
    for i in range(3):
        torch.testing.assert_close(together[i], gla.chunk_ssd(**{**one, "x": x["x"][i]}).o)
    offsets = torch.tensor([[0, T], [0, T]])
    with pytest.raises(NotImplementedError, match=r"torch\.vmap goes over neither packed sequences"):
        torch.vmap(lambda c: gla.chunk_ssd(**one, cu_seqlens=c).o)(offsets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt_min": -1.0}, r"\(dt_min, dt_max\) is \(-1.0, inf\); expected two numbers, the first at least 0"),
        ({"dt_min": 2.0, "dt_max": 1.0}, r"\(dt_min, dt_max\) is \(2.0, 1.0\)"),
        ({"A": torch.zeros(HV)}, "A is float32; expected float64 with torch.float64 inputs"),
        ({"D": torch.zeros(HV, V + 1)}, r"D has shape \[4, 6\]; expected \[Hv, V\] with Hv=4, V=5"),
        ({"D": torch.zeros(1, HV, V)}, r"D has shape \[1, 4, 5\]; expected \[Hv\] or \[Hv, V\]"),
        ({"q": torch.zeros(B, T, HV, K)}, r"k has shape \[2, 70, 2, 8\]; expected .* with .*H=4"),
        ({"dt": torch.zeros(B, T, HV, dtype=torch.int64)}, "dt is int64; expected float64 or"),
        (
            {"z": torch.zeros(B, T, HV, 1, dtype=torch.float64)},
            r"z has shape \[2, 70, 4, 1\]; expected \[B, T, Hv, V\]",
        ),
        ({"z": torch.zeros(B, T, HV, V)}, "z is float32; expected float64, as q"),
        ({"z": torch.zeros(B, T, HV, V, dtype=torch.float64, device="meta")}, "z is on meta and q is on cpu; move"),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_it_refuses(changes, message, needs_grad):
    x = inputs()
    x["x"].requires_grad_(needs_grad)
    with pytest.raises((ValueError, TypeError), match=message):
        gla.chunk_ssd(**x | changes)


# ---- mamba_chunk_scan_combined


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions that a scan calls, and whether it passes D."""
    made = []

    def spy(name):
        function = getattr(ops, name)

        def call(*args, **options):
            made.append((name, name == "chunk_ssd" and args[5] is not None))
            return function(*args, **options)

        monkeypatch.setattr(ops, name, call)

    spy("chunk_ssd")
    spy("chunk_gla")
    return made


def scan(x, **options):
    x = {**x, "D": x["D"][:, 0]}
    names = {"q": "C", "k": "B", "initial_state": "initial_states"}
    x = {names.get(n, n): y.mT if n == "initial_state" else y for n, y in x.items()}
    return mamba_chunk_scan_combined(**x, chunk_size=64, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("chunk_ssd", True)),
        ({"z": torch.ones(B, T, HV, V)}, ("chunk_ssd", True)),
        ({"z": torch.ones(B, T, HV, V, dtype=torch.float64)}, ("chunk_ssd", True)),
        ({"seq_idx": torch.zeros(B, T, dtype=torch.int32)}, ("chunk_gla", False)),
    ],
)
def test_a_scan_is_one_op_unless_its_state_restarts(calls, options, expected):
    scan(inputs(dtype=torch.float32), **options)
    assert calls == [expected]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, "chunk_gla"), (torch.bfloat16, "chunk_ssd")])
def test_autocast_does_not_round_out(calls, dtype, expected):
    with torch.autocast("cpu", torch.bfloat16):
        out = scan(inputs(dtype=dtype))
    assert out.dtype == dtype
    assert [name for name, _ in calls] == [expected]
