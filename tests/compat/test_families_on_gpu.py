"""The drop-ins beside the kernels that they replace, in bfloat16 on a GPU."""

import pytest
import torch

from gla_core.compat import fla as ours
from gla_core.compat.mamba_ssm import mamba_chunk_scan_combined

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
B, T, H, K, M = 2, 200, 4, 64, 32
FAMILIES = {  # module of fla.ops: tokens after q, k and v, and further arguments
    "simple_gla": (("g",), {}),
    "retention": ((), {}),
    "lightning_attn": ((), {"layer_idx": 1, "num_layers": 4}),
    "linear_attn": ((), {"normalize": False}),
    "lightnet": ((), {}),
    "gsa": (("s", "slot_gates"), {}),
    "rwkv6": (("w",), {}),
    "kda": (("key_gates", "beta"), {"use_qk_l2norm_in_kernel": True}),
    "gated_delta_rule": (("g", "beta"), {"use_qk_l2norm_in_kernel": True}),
    "delta_rule": (("beta",), {"use_qk_l2norm_in_kernel": True}),
}
GATES = ("g", "slot_gates", "key_gates", "w")


def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def tokens(family):
    """Returns the tensors of a function of FLA, by name, which require gradients."""
    torch.manual_seed(0)
    sizes = {"q": (K,), "k": (K,), "v": (K,), "s": (M,), "g": (), "slot_gates": (M,), "key_gates": (K,), "w": (K,)}
    sizes |= {"beta": ()}
    actual = {}
    for name in ("q", "k", "v", *FAMILIES[family][0]):
        x = torch.randn(B, T, H, *sizes[name], device="cuda")
        x = torch.nn.functional.logsigmoid(x) if name in GATES else x.sigmoid() if name == "beta" else x.bfloat16()
        name = "g" if name in GATES[:3] else "r" if (family, name) == ("rwkv6", "q") else name
        actual[name] = x.requires_grad_()
    if family == "rwkv6":
        actual["u"] = torch.randn(H, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return actual


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_fla(family):
    theirs = getattr(pytest.importorskip(f"fla.ops.{family}", reason="needs FLA: make test-fla"), f"chunk_{family}")
    arguments, options = tokens(family), FAMILIES[family][1]
    actual, expected = (f(**arguments, **options)[0] for f in (getattr(ours, f"chunk_{family}"), theirs))
    assert apart(actual, expected) < 1e-2


def scan_inputs():
    """Returns the tensors of Mamba-2's scan, which require gradients; two heads read a group of B and C."""
    torch.manual_seed(0)
    half = {"x": (B, T, H, 32), "B": (B, T, 2, K), "C": (B, T, 2, K), "z": (B, T, H, 32)}
    actual = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in half.items()}
    actual |= {"dt": torch.randn(B, T, H, device="cuda"), "A": -torch.randn(H, device="cuda").exp()}
    actual |= {"D": torch.randn(H, device="cuda"), "dt_bias": torch.randn(H, device="cuda")}
    return {name: x.requires_grad_() for name, x in actual.items()}


@pytest.mark.parametrize("optional", [(), ("D",), ("D", "z", "dt_bias")], ids="+".join)
def test_scan_in_bfloat16_is_near_the_scan_in_float64(optional):
    """Pieces around the op are compiled on a GPU, and not on the CPU that computes what is expected."""
    arguments = {name: x for name, x in scan_inputs().items() if name in ("x", "B", "C", "dt", "A", *optional)}
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in arguments.items()}
    do = torch.randn(B, T, H, 32)
    results = []
    for x in (arguments, exact):
        out = mamba_chunk_scan_combined(**x, chunk_size=64, dt_softplus=True)
        results.append((out, *torch.autograd.grad(out, list(x.values()), do.to(out))))
    for name, a, b in zip(("out", *arguments), *results, strict=True):
        assert apart(a.cpu(), b) < 1.5e-2, name


def test_scan_of_mamba_ssm():
    combined = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined", reason="needs mamba_ssm")
    theirs = combined.mamba_chunk_scan_combined
    arguments = {name: x.detach() for name, x in scan_inputs().items()}
    seq_idx = (torch.arange(T, device="cuda") >= 77).int().expand(B, T).contiguous()
    options = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True, "seq_idx": seq_idx}
    actual, expected = (f(**arguments, **options) for f in (mamba_chunk_scan_combined, theirs))
    for a, b in zip(actual, expected, strict=True):
        assert apart(a, b) < 1e-2
