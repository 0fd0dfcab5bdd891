"""The template is right. tests/test_wheel.py runs the commands of its README."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import Backend

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "plugins" / "gla_plugin_template"
README = (TEMPLATE / "README.md").read_text()


@pytest.fixture
def template(on_path):
    on_path("gla_plugin_template", TEMPLATE)


@pytest.mark.parametrize("dtype", FORWARD)
@pytest.mark.parametrize(("shape", "dim"), [((5, 33), -1), ((3, 1025), 1), ((3, 50, 7), 1), ((0, 4), 1), ((3, 0), 1)])
def test_softmax(template, dtype, shape, dim):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    y = gla.online_softmax(x, dim, backend="gla_plugin_template")
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert relative_error(y, oracle.softmax(x, dim)) < FORWARD[dtype]


def test_rows_of_minus_infinity(template):
    x = torch.randn(3, 40)
    x[0], x[1, 1:] = -torch.inf, -torch.inf
    y = gla.online_softmax(x, backend="gla_plugin_template")
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.tensor([1.0, *[0.0] * 39]))
    assert relative_error(y, oracle.softmax(x)) < FORWARD[torch.float32]


@pytest.fixture
def with_a_second_op(template):
    """Registers the backend of README.md's step 5."""
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```$", README, re.DOTALL | re.MULTILINE)
    names = {"Backend": Backend, "online_softmax": lambda x, dim: x.softmax(dim)}
    exec(textwrap.dedent(block).replace("Backend(", "backend = Backend(", 1), names)
    with gla.register(names["backend"]) as backend:
        yield backend.name


def arguments(dtype, B=2, T=70, H=2, K=8, V=5):
    q, k, g = (torch.randn(B, T, H, K).to(dtype) for _ in range(3))
    return q, k, torch.randn(B, T, H, V).to(dtype), -g.abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
def test_the_example_of_another_op(with_a_second_op, dtype, gated):
    q, k, v, g = arguments(dtype)
    g = g if gated else None
    state = torch.randn(2, 2, 8, 5)
    actual = gla.chunk_gla(q, k, v, g, initial_state=state, output_final_state=True, backend=with_a_second_op)
    expected = oracle.chunk_gla(q, k, v, g, initial_state=state)
    for x, y in zip(actual, expected, strict=False):
        assert relative_error(x, y) < FORWARD[dtype]


def test_its_gradients_come_from_another_backend(with_a_second_op):
    q, k, v, g = (x.requires_grad_() for x in arguments(torch.float32, T=5))
    gla.chunk_gla(q, k, v, g, backend=f"chunk_gla_fwd={with_a_second_op};*=reference")[0].sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, g))


def test_what_it_does_not_declare_is_refused(with_a_second_op):
    q, k, v, g = arguments(torch.float32, B=1, T=6)
    said = re.search(r'such as "(takes no .*?)"', README.replace("\n  ", " "))[1]
    with pytest.raises(gla.NoBackendError, match=re.escape(said)):
        gla.chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 2, 6]), backend=with_a_second_op)
    with pytest.raises(gla.NoBackendError, match="has no grouped queries"):
        gla.chunk_gla(torch.cat([q, q], 2), k, v, g, backend=with_a_second_op)
