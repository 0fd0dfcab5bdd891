"""The template is right, and the commands of its README work from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "plugins" / "gla_plugin_template"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (TEMPLATE / "README.md").read_text(), re.DOTALL | re.MULTILINE)


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


def test_it_is_small():
    python = [path for path in (TEMPLATE / "gla_plugin_template").iterdir() if path.suffix == ".py"]
    assert len(python) == 2


def run(*command, **kwargs):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """`shell(block)` runs commands of the README in an environment with gla-core, where an earlier block left off."""
    folder = tmp_path_factory.mktemp("ten_minutes")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", next(folder.glob("*.whl")))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # gla-core's, and hatchling
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GLA_")}
    clean |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "TEMPLATE": str(TEMPLATE)}
    clean |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    empty = folder / "empty"
    empty.mkdir()

    def step(block):
        made = empty / "my_softmax"
        return run("bash", "-e", "-c", block, cwd=made if made.exists() else empty, env=clean)

    return step


def test_the_readme_has_its_steps():
    first_words = [block.split()[0] + " " + block.split()[1] for block in BLOCKS]
    assert first_words == ["cp -r", "pip install", "gla backends", "gla conformance", "gla bench"]


# The steps are one session in one shell: each needs those before it.


@pytest.fixture(scope="module")
def installed(shell):
    shell(BLOCKS[0])
    shell(BLOCKS[1])
    return shell


def test_copied_and_renamed_nothing_of_the_old_name_is_left(installed):
    assert (
        installed("grep -rIl -e gla_plugin_template -e gla-plugin-template --exclude-dir=__pycache__ . || true") == ""
    )
    assert installed("ls my_softmax").split() == ["__init__.py", "online_softmax.py"]


def test_it_appears_and_is_chosen(installed):
    shown = installed(BLOCKS[2])
    assert re.search(r"my_softmax.*0\.1\.0.*online_softmax", shown)
    assert "-> my_softmax" in shown
    where = installed("python -c 'import importlib.util as u; print(u.find_spec(\"gla_core\").origin)'")
    assert "site-packages" in where
    assert str(ROOT / "gla_core") not in where


def test_it_passes_conformance_from_the_folder_that_is_edited(installed):
    folder = installed("pwd -P").strip()
    assert f"judges online_softmax from {folder}/my_softmax/online_softmax.py" in installed(BLOCKS[3])


def test_it_appears_in_a_benchmark(installed):
    assert "my_softmax" in installed(BLOCKS[4])
