"""Registration with flash-linear-attention 0.6.0's own backends: `make test-fla`, on a CPU too."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from gla_core.compat.fla import accelerate
from gla_core.compat.fla.accelerate import FUNCTIONS, HOMES
from gla_core.compat.fla.on_cpu import REPLACED
from gla_core.compat.fla.registry import OPERATIONS

backends = pytest.importorskip("fla.backends", reason="needs flash-linear-attention 0.6.0: make test-fla")

from fla.modules.activations import swiglu_linear

GUIDE = Path(__file__).parents[2] / "docs" / "from-fla.md"
HOME = {
    "fused_chunk_simple_gla": "fla.ops.simple_gla",
    "fused_recurrent_simple_gla": "fla.ops.simple_gla",
    "parallel_simple_gla": "fla.ops.simple_gla",
    "chunk_kda": "fla.ops.kda",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
}
"""The modules of functions that FLA dispatches."""


def is_dispatched(function):
    """Returns whether one of a function's wrappers holds a registry of backends."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(isinstance(cell.cell_contents, backends.BackendRegistry) for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@pytest.fixture(params=HOME)
def kept(request):
    """A function of FLA that a module of the user's imported before, and which a backend of FLA computes."""
    function = getattr(importlib.import_module(HOME[request.param]), request.param)
    enabled = [True]

    class Theirs(backends.BaseBackend):
        backend_type, priority = "theirs", 0

        def is_enabled(self):
            return bool(enabled)

    backends.register(OPERATIONS.get(request.param, function), backend=Theirs)(lambda *args, **kwargs: ("theirs", None))
    yield function
    enabled.clear()


def tokens(name):
    q, k, v, g = (torch.randn(1, 5, 2, d) for d in (4, 4, 3, 4))
    g, beta = -g.exp(), torch.rand(1, 5, 2)
    return q, k, v, *{"chunk_kda": (g, beta), "chunk_gated_delta_rule": (g[..., 0], beta)}.get(name, (g[..., 0],))


def test_the_guide_lists_the_functions_that_have_an_entry():
    """A newer FLA may have more entries; list them in the guide."""
    replaced = [(home, name) for homes in (HOMES, REPLACED) for home, members in homes.items() for name in members]
    names = {name for home, name in replaced if is_dispatched(getattr(importlib.import_module(home), name))}
    listed = re.search(r"`fla\.backends\.register`:\n\n((?:- .*\n)+)", GUIDE.read_text(encoding="utf-8"))
    assert names == set(re.findall(r"`(\w+)`", listed[1]))


def test_a_function_that_was_imported_before_is_computed_here(kept):
    arguments = tokens(kept.__name__)
    assert kept(*arguments)[0] == "theirs"
    with accelerate():
        torch.testing.assert_close(kept(*arguments), FUNCTIONS[kept.__name__](*arguments))
    assert kept(*arguments)[0] == "theirs"


@pytest.mark.parametrize("order", [1, -1])
def test_it_is_computed_here_until_the_last_acceleration_is_undone(kept, order):
    arguments, accelerations = tokens(kept.__name__), [accelerate(), accelerate(kept.__name__)]
    for acceleration in accelerations[::order]:
        assert isinstance(kept(*arguments)[0], torch.Tensor)
        acceleration.undo()
    assert kept(*arguments)[0] == "theirs"


def test_functions_that_are_not_named_are_left_alone(kept):
    with accelerate("chunk_simple_gla"):
        assert kept(*tokens(kept.__name__))[0] == "theirs"


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        ("parallel_simple_gla", {"output_attentions": True}),
        ("chunk_kda", {"return_intermediate_states": True}),
        ("chunk_gated_delta_rule", {"cp_context": "a context"}),
    ],
    indirect=["kept"],
)
def test_calls_that_are_not_computed_here_go_to_the_next_backend(kept, more):
    with accelerate():
        assert kept(*tokens(kept.__name__), **more)[0] == "theirs"


def test_other_functions_of_an_operation_are_left_alone():
    other = backends.dispatch("gated_delta_rule")(lambda *args: "the original")
    with accelerate():
        assert other(*tokens("chunk_gated_delta_rule")) == "the original"


def test_functions_for_tensors_on_a_cpu():
    x, y, weight = torch.randn(2, 4), torch.randn(2, 4), torch.randn(3, 4)
    with accelerate(cpu=True):
        torch.testing.assert_close(swiglu_linear(x, y, weight, None), (torch.nn.functional.silu(x) * y) @ weight.T)


@pytest.mark.parametrize("name", HOME)
def test_a_function_of_its_modules_is_compiled_without_a_break(name):
    """A call through the dispatcher would break the graph, so the names in its modules are exchanged too."""
    home, arguments = importlib.import_module(HOME[name]), tokens(name)
    torch._dynamo.reset()
    with accelerate():
        compiled = torch.compile(lambda *args: getattr(home, name)(*args)[0], fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*arguments), FUNCTIONS[name](*arguments)[0])
