import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut

from gla_core.bench.kept import bytes_kept
from gla_core.nn.recompute import not_kept, recomputed


def gated(x, y, gate):
    return x * F.silu(gate) if y is None else (x + y) * F.silu(gate)


@pytest.fixture
def inputs():
    return [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_values_and_derivatives(inputs):
    """Values, first and second derivatives are right."""
    assert torch.equal(recomputed(gated, *inputs), gated(*inputs))
    assert torch.autograd.gradcheck(lambda *x: recomputed(gated, *x), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: recomputed(gated, *x), inputs)


def test_a_tensor_that_depends_on_another(inputs):
    """Each tensor's gradient is that of the function, and does not pass through the other tensors."""
    x, gate = inputs[0], inputs[2]

    def derivative(function):
        (first,) = torch.autograd.grad(function(gate.exp() * x, None, gate).sum(), gate, create_graph=True)
        return first, torch.autograd.grad(first.sum(), gate)[0]

    torch.testing.assert_close(derivative(lambda *y: recomputed(gated, *y)), derivative(gated))
    (actual,) = torch.autograd.grad(recomputed(gated, gate.exp(), None, gate).sum(), gate)
    torch.testing.assert_close(actual, torch.autograd.grad(gated(gate.exp(), None, gate).sum(), gate)[0])


def test_what_needs_no_gradient_gets_none(inputs):
    x, y, gate = inputs[0], inputs[1].detach(), inputs[2]
    expected = torch.autograd.grad(gated(x * 2, y, gate).sum(), [x, gate])
    assert all(map(torch.equal, torch.autograd.grad(recomputed(gated, x * 2, y, gate).sum(), [x, gate]), expected))
    (dx,) = torch.autograd.grad(recomputed(gated, x, None, gate.detach()).sum(), [x])
    torch.testing.assert_close(dx, F.silu(gate.detach()))
    assert not recomputed(gated, x.detach(), y, gate.detach()).requires_grad


def test_the_arguments_alone_are_kept(inputs):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        recomputed(gated, *inputs)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]


def test_under_transforms_and_compiled(inputs):
    x, y, gate = (z.detach() for z in inputs)
    expected = torch.func.vmap(torch.func.grad(lambda *z: gated(*z).sum()))(x, y, gate)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda *z: recomputed(gated, *z).sum()))(x, y, gate), expected)
    compiled = torch.compile(lambda *z: recomputed(gated, *z), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), gated(*inputs))


class Projected(torch.nn.Module):
    """A linear layer whose input is computed again."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, *inputs):
        y = recomputed(gated, *inputs)
        with not_kept(y):
            return self.linear(y)


def test_what_a_linear_layer_does_not_keep(inputs):
    """Derivatives are right, a second time too, and the input of the layer does not stay."""
    module = Projected()
    weight = module.linear.weight
    assert torch.autograd.gradcheck(lambda *x: module(*x[:3]), (*inputs, weight))
    assert torch.autograd.gradgradcheck(lambda *x: module(*x[:3]), (*inputs, weight))
    expected = torch.autograd.grad(module.linear(gated(*inputs)).square().sum(), [*inputs, weight])
    loss = module(*inputs).square().sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, [*inputs, weight], retain_graph=True), expected)
    (actual,) = torch.autograd.grad(loss, [weight])  # alone, without the gradients of the inputs
    torch.testing.assert_close(actual, expected[-1])

    def projected(x):
        with not_kept(x):
            return module.linear(x)

    number = 3 * 4 * 8  # the result
    assert bytes_kept(lambda: projected(recomputed(gated, *inputs))) == number
    assert bytes_kept(lambda: projected(gated(*inputs))) > number  # not a result of `recomputed`


def test_gradients_by_a_formula(inputs):
    """The formula gives the gradients, and the function runs once in the backward, for all layers that read it."""
    calls = []

    def function(*x):
        calls.append(len(x))
        return gated(*x)

    def gradients(x, y, gate, dy):
        sigma = torch.sigmoid(gate)
        dx = gate * sigma * dy
        return dx, dx if y.requires_grad else None, sigma * (1 + gate * (1 - sigma)) * (x + y) * dy

    first, second = (torch.nn.Linear(5, 4, dtype=torch.float64) for _ in range(2))

    def run(y):
        with not_kept(y):
            return first(y) * second(y)

    wanted = [*inputs, first.weight, second.weight]
    actual = torch.autograd.grad(run(recomputed(function, *inputs, gradients=gradients)).sum(), wanted)
    torch.testing.assert_close(actual, torch.autograd.grad(run(gated(*inputs)).sum(), wanted))
    assert len(calls) == 2
    assert bytes_kept(lambda: run(recomputed(function, *inputs, gradients=gradients))) == 3 * 3 * 4 * 8
    for x in first.weight, second.weight:
        x.requires_grad_(False)
    calls.clear()
    torch.autograd.grad(run(recomputed(function, *inputs, gradients=gradients)).sum(), inputs)
    assert len(calls) == 1, "the formula alone needs no result"


def test_a_formula_under_transforms(inputs):
    x, gate = (z.detach() for z in inputs[:2])

    def summed(gate):
        return recomputed(lambda g: g * x, gate, gradients=lambda g, dy: (x * dy,)).sum()

    assert torch.equal(torch.func.grad(summed)(gate), x)


def test_an_argument_that_changes_after_a_part_of_the_backward(inputs):
    layer, x = torch.nn.Linear(5, 4, dtype=torch.float64), 1 * inputs[0]
    y = recomputed(lambda x: x * x, x, gradients=lambda x, dy: (2 * x * dy,))
    with not_kept(y):
        loss = layer(y).sum()
    torch.autograd.grad(loss, layer.weight, retain_graph=True)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"a tensor \[3, 5\] that the backward needs was changed in place"):
        loss.backward()


def test_second_derivatives_with_a_formula(inputs):
    """The gradient of a layer's weight can be differentiated. The formula cannot, and is not taken as constant."""
    layer, x = torch.nn.Linear(5, 4, dtype=torch.float64), inputs[0]

    def gradient(function, wanted):
        y = function(x)
        with not_kept(y):
            loss = layer(y).square().sum()
        return torch.autograd.grad(loss, wanted, create_graph=True)[0].sum()

    def by_formula(x):
        return recomputed(lambda x: x * x, x, gradients=lambda x, dy: (2 * x * dy,))

    functions = (by_formula, lambda x: x * x)
    actual, wanted = (torch.autograd.grad(gradient(function, layer.weight), x) for function in functions)
    torch.testing.assert_close(actual, wanted)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient(by_formula, x).backward()


def test_a_weight_that_changes_before_the_backward(inputs):
    module = Projected()
    loss = module(*inputs).sum()
    with torch.no_grad():
        module.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"a tensor \[5, 4\] that the backward needs was changed in place"):
        loss.backward()


def test_within_gradient_checkpointing(inputs):
    """The region keeps its arguments alone, and its gradients are right."""
    module = Projected()

    def run():
        return torch.utils.checkpoint.checkpoint(lambda *x: module(*(2 * y for y in x)), *inputs, use_reentrant=False)

    assert bytes_kept(run) == 3 * 4 * 8
    actual = torch.autograd.grad(run().sum(), inputs)
    y = [2 * x for x in inputs]
    torch.testing.assert_close(actual, torch.autograd.grad(module(*y).sum(), inputs))


def test_the_compiler_computes_it_again(inputs):
    """The compiler would otherwise keep what a matrix product of the backward reads."""
    kept = []

    def forward(graph, _):
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        kept.extend(node.name for node in results[1:])  # the first one is y
        return make_boxed_func(graph.forward)

    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=min_cut
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: recomputed(gated, *x) @ weight, fullgraph=True, backend=backend)
    y = compiled(*inputs)
    torch.testing.assert_close(y, gated(*inputs) @ weight)
    assert not any(name.startswith(("mul", "silu", "add")) for name in kept)


def test_a_strict_export_has_plain_operations(inputs):
    class Module(torch.nn.Module):
        def forward(self, *x):
            return recomputed(gated, *x)

    graph = torch.export.export(Module(), tuple(inputs), strict=True).graph
    assert not any("checkpoint" in str(node.target) for node in graph.nodes)


def test_a_weight_without_memory(inputs):
    """Its product keeps the result of the function, or a sentence says what is missing."""
    layer, weight = torch.nn.Linear(5, 4, dtype=torch.float64), torch.nn.Parameter(torch.rand(5, dtype=torch.float64))
    values = weight.detach().clone()

    def gather():
        weight.untyped_storage().resize_(values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(values)

    def loss(free_before):
        y = recomputed(lambda x, weight: x.sin() * weight, inputs[0], weight, weights=(weight,))
        if free_before:
            y.register_hook(lambda gradient: gather())
            weight.untyped_storage().resize_(0)
        with not_kept(y):
            return layer(y).square().sum()

    wanted = [inputs[0], layer.weight, weight]
    expected = torch.autograd.grad(layer(inputs[0].sin() * weight).square().sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad(loss(free_before=True), wanted), expected)
    late = loss(free_before=False)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"a tensor \[5\] that the backward computes with has no memory"):
        late.backward()


def test_a_result_that_is_changed_before_the_product(inputs):
    """Its product keeps it, as the function would give another."""
    layer = torch.nn.Linear(5, 4, dtype=torch.float64)
    layer.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    y = recomputed(gated, *inputs)
    with not_kept(y):
        loss = layer(y).sum()
    (actual,) = torch.autograd.grad(loss, [layer.weight])
    torch.testing.assert_close(actual, 2 * gated(*inputs).detach().flatten(0, -2).sum(0).expand(4, 5))
