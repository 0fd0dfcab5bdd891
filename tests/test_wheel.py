"""The wheel, installed without the repository in an environment of its own, runs every backend that it contains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_EVERY_BACKEND = """
import importlib.metadata, sys, torch, gla_core as gla
assert not any("REPOSITORY" in p for p in sys.path), sys.path
assert "REPOSITORY" not in gla.__file__, gla.__file__
assert importlib.metadata.version("gla-core") == gla.__version__
names = [b.name for b in gla.backends() if b.error is None and "chunk_gla_fwd" in b.ops]
assert len(names) == len(gla.backends()), gla.backends()
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
        "gla_tools",
        f"gla_core-{'0.1.0'}.dist-info",
    }
    assert "gla_core/py.typed" in names
    template = ROOT / "plugins" / "gla_plugin_template"
    copied = {path.relative_to(template).as_posix() for path in template.rglob("*.*") if path.suffix != ".pyc"}
    folder = "gla_tools/template/"
    assert {name.removeprefix(folder) for name in names if name.startswith(folder)} == copied


def test_the_links_of_its_readme_work_outside_of_the_repository(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    targets = re.findall(r"\]\(([^)]+)\)", zipfile.ZipFile(wheel).read(metadata).decode())
    assert any(target.endswith(".svg") for target in targets)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_it_runs_in_a_fresh_environment(wheel, own_backends, tmp_path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    # Its dependencies come from the environment of the tests; a path added in this way activates no editable install.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = RUN_EVERY_BACKEND.replace("REPOSITORY", str(ROOT / "gla_core").removesuffix("gla_core") + "gla_core")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GLA_")}
    clean["TRITON_INTERPRET"] = "1"  # every backend then runs on the CPU
    assert run(python, "-c", script, cwd=tmp_path, env=clean).split() == own_backends
    table = run(environment / "bin" / "gla", "backends", cwd=tmp_path, env=clean)
    assert all(name in table for name in own_backends)
    run(environment / "bin" / "gla", "new-backend", "mine", cwd=tmp_path, env=clean)
    assert (tmp_path / "mine" / "mine" / "online_softmax.py").exists()
