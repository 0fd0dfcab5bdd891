"""The wheel, installed without the repository in an environment of its own, runs every backend that it contains.

There, the commands of the template's README make a plugin in an empty folder.
"""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # one process runs all of them, and builds one wheel
ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "plugins" / "gla_plugin_template"
NAME = "softmax_in_ten_minutes"
"""The name of the new backend; its author may have installed the README's my_softmax beside gla-core."""
README = (TEMPLATE / "README.md").read_text().replace("my_softmax", NAME)
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
RUN_EVERY_BACKEND = """
import importlib.metadata, sys, torch, gla_core as gla
assert not any("REPOSITORY" in p for p in sys.path), sys.path
assert "REPOSITORY" not in gla.__file__, gla.__file__
assert importlib.metadata.version("gla-core") == gla.__version__
points = importlib.metadata.distribution("gla-core").entry_points.select(group="gla_core.backends")
ours = [b for b in gla.backends() if b.plugin in points.names]  # other packages' are left out
names = [b.name for b in ours if b.error is None and "chunk_gla_fwd" in b.ops]
assert len(names) == len(points), ours
q = torch.randn(1, 5, 2, 16)
for name in names:
    o, _ = gla.chunk_gla(q, q, q, -q.abs(), backend=name)
    assert o.isfinite().all()
print(*names)
"""


def run(*command, **kwargs):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


def test_it_carries_the_core_the_backends_and_the_type_marker(wheel, own_backends):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "gla_core",
        *(f"gla_{name}" for name in own_backends),
        "gla_triton_kernels",
        "gla_triton_runtime",
        "gla_tools",
        f"gla_core-{'0.1.0'}.dist-info",
    }
    assert "gla_core/py.typed" in names
    files = (path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    copied = {path.relative_to(TEMPLATE).as_posix() for path in files}
    folder = "gla_tools/template/"
    assert {name.removeprefix(folder) for name in names if name.startswith(folder)} == copied


def test_the_links_of_its_readme_work_outside_of_the_repository(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    targets = re.findall(r"\]\(([^)]+)\)", zipfile.ZipFile(wheel).read(metadata).decode())
    assert any(target.endswith(".svg") for target in targets)
    assert [target for target in targets if not target.startswith("https://")] == []


@pytest.fixture(scope="module")
def shell(wheel, tmp_path_factory):
    """A function: `shell(block)` runs commands in an empty folder with the wheel installed, after earlier blocks."""
    folder = tmp_path_factory.mktemp("ten_minutes")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    # Its dependencies, and hatchling, come from the environment of the tests; a path added in this way activates no
    # editable install.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GLA_")}
    clean |= {"PATH": os.pathsep.join([str(environment / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]])}
    clean |= {"PIP_PYTHON": str(python), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 means: without
    clean |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    empty = folder / "empty"
    empty.mkdir()

    def step(block, **variables):
        made = empty / NAME
        return run("bash", "-e", "-c", block, cwd=made if made.exists() else empty, env=clean | variables)

    return step


def test_it_runs_in_a_fresh_environment(shell, own_backends):
    script = RUN_EVERY_BACKEND.replace("REPOSITORY", str(ROOT / "gla_core").removesuffix("gla_core") + "gla_core")
    ran = shell('python -c "$SCRIPT"', SCRIPT=script, TRITON_INTERPRET="1")  # every backend then runs on the CPU
    assert ran.split() == own_backends


# ---- the commands of the template's README: one session in one shell, in which each step needs the earlier ones


def test_the_readme_of_the_template_has_its_steps():
    first_words = [" ".join(block.split()[:2]) for block in BLOCKS]
    assert first_words == ["gla new-backend", "gla backends", "gla conformance", "gla bench"]


@pytest.fixture(scope="module")
def installed(shell):
    shell(BLOCKS[0])
    return shell


def test_a_new_backend_appears_and_is_chosen(installed, own_backends):
    shown = installed(BLOCKS[1])
    assert all(name in shown for name in own_backends)
    assert re.search(rf"{NAME}.*0\.1\.0.*online_softmax", shown)
    assert f"-> {NAME}" in shown


@pytest.mark.thorough
def test_it_passes_conformance_from_the_folder_that_is_edited(installed):
    folder = installed("pwd -P").strip()
    assert f"judges online_softmax from {folder}/{NAME}/online_softmax.py" in installed(BLOCKS[2])


@pytest.mark.thorough
def test_it_appears_in_a_benchmark(installed):
    assert NAME in installed(BLOCKS[3])
