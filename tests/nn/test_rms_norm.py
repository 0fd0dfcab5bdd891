import pytest
import torch

from gla_core.nn.rms_norm import RMSNormGated


def test_values_by_hand():
    norm = RMSNormGated(2, eps=0.0).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)  # root mean square sqrt(12.5)
    torch.testing.assert_close(norm(x), torch.tensor([3.0, 40.0], dtype=torch.float64) / 12.5**0.5)
    gate = torch.tensor([0.0, 1e3], dtype=torch.float64)  # silu: 0 and 1000
    torch.testing.assert_close(norm(x, gate), torch.tensor([0.0, 4e4], dtype=torch.float64) / 12.5**0.5)


def test_eps_keeps_zeros_finite():
    assert torch.equal(RMSNormGated(4)(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("inputs", [1, 2])
def test_half_precision_is_rounded_once(inputs):
    norm = RMSNormGated(64)
    torch.nn.init.normal_(norm.weight)
    norm = norm.bfloat16()
    args = torch.randn(inputs, 30, 64).bfloat16()
    y = norm(*args)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, norm.float()(*args.float()).bfloat16())


@pytest.mark.parametrize("gated", [False, True])
def test_gradients(gated):
    norm = RMSNormGated(5, eps=0.1).double()
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(1 + gated)]
    assert torch.autograd.gradcheck(lambda weight, *rest: norm(*rest), (norm.weight, *inputs))


def test_without_weight():
    norm = RMSNormGated(8, elementwise_affine=False)
    assert list(norm.parameters()) == []
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), RMSNormGated(8)(x))


def test_a_gate_function_with_parameters_gets_gradients():
    norm = RMSNormGated(8, gate_fn=torch.nn.PReLU())
    norm(*torch.randn(2, 3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in norm.parameters())
    assert len(list(norm.parameters())) == 2


def test_a_kernel_computes_what_it_can():
    seen: list[tuple[bool, float]] = []

    def kernel(x, weight, gate, eps):
        seen.append((gate is None, eps))
        return None if gate is None else 7 * x

    x, gate = torch.randn(2, 3, 8)
    norm = RMSNormGated(8, eps=0.1)
    expected = norm(x)
    norm.kernel = kernel
    assert torch.equal(norm(x, gate), 7 * x)
    assert torch.equal(norm(x), expected)  # it returned None
    assert seen == [(False, 0.1), (True, 0.1)]
    norm.mean_over_ranks = lambda mean: mean
    torch.testing.assert_close(norm(x), expected)
    assert len(seen) == 2


@pytest.mark.parametrize("options", [{"groups": 2}, {"norm_before_gate": False}, {"gate_fn": "sigmoid"}], ids=str)
def test_a_kernel_is_not_asked_for_other_norms(options):
    x, gate = torch.randn(2, 3, 8)
    norm = RMSNormGated(8, **options)
    expected = norm(x, gate)
    norm.kernel = lambda *args: torch.zeros_like(x)
    assert torch.equal(norm(x, gate), expected)
