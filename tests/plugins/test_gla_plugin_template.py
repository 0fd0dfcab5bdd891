"""The template is right, and the commands of its README work from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
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
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


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
    found = gla.chunk_gla(q, k, v, g, initial_state=state, output_final_state=True, backend=with_a_second_op)
    expected = oracle.chunk_gla(q, k, v, g, initial_state=state)
    for x, y in zip(found, expected, strict=False):
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


def run(*command, **kwargs):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """A function: `shell(block)` runs commands of the README with gla-core installed, after earlier blocks."""
    folder = tmp_path_factory.mktemp("ten_minutes")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    # Its dependencies, and hatchling, come from the environment of the tests.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(folder.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GLA_")}
    clean |= {"PATH": os.pathsep.join([str(environment / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]])}
    clean |= {"PIP_PYTHON": str(python), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 means: without
    clean |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    empty = folder / "empty"
    empty.mkdir()

    def step(block):
        made = empty / "my_softmax"
        return run("bash", "-e", "-c", block, cwd=made if made.exists() else empty, env=clean)

    return step


def test_the_readme_has_its_steps():
    first_words = [" ".join(block.split()[:2]) for block in BLOCKS]
    assert first_words == ["gla new-backend", "gla backends", "gla conformance", "gla bench"]


# The steps are one session in one shell; each needs the earlier ones.


@pytest.fixture(scope="module")
def installed(shell):
    shell(BLOCKS[0])
    return shell


def test_it_appears_and_is_chosen(installed):
    shown = installed(BLOCKS[1])
    assert re.search(r"my_softmax.*0\.1\.0.*online_softmax", shown)
    assert "-> my_softmax" in shown
    where = installed("python -c 'import importlib.util as u; print(u.find_spec(\"gla_core\").origin)'")
    assert "site-packages" in where
    assert str(ROOT / "gla_core") not in where


@pytest.mark.thorough
def test_it_passes_conformance_from_the_folder_that_is_edited(installed):
    folder = installed("pwd -P").strip()
    assert f"judges online_softmax from {folder}/my_softmax/online_softmax.py" in installed(BLOCKS[2])


@pytest.mark.thorough
def test_it_appears_in_a_benchmark(installed):
    assert "my_softmax" in installed(BLOCKS[3])
