"""Programs that run with functions replaced: `python -m gla_core.compat.fla`."""

import sys

import pytest

from gla_core.compat.program import run
from gla_core.compat.replace import Acceleration

PROGRAM = """
import pickle, sys

class Config:
    pass

assert isinstance(pickle.loads(pickle.dumps(Config())), Config)
print(__name__, sys.argv[1:], options)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program that imports a module beside it; returns its path."""
    (tmp_path / "program.py").write_text(f"from beside import options{PROGRAM}")
    (tmp_path / "beside.py").write_text("options = 'beside'")
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.delenv("RANK", raising=False)
    yield tmp_path / "program.py"
    sys.modules.pop("beside", None)


def accelerate(**options):
    assert options == {"cpu": True}
    return Acceleration("a library", [], "")


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_script(program, capsys, monkeypatch, rank):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    run("name", accelerate, {"cpu": "help"}, ["--cpu", str(program), "--cpu", "-m", "3"])
    out, err = capsys.readouterr()
    assert out == "__main__ ['--cpu', '-m', '3'] beside\n"
    assert err == ("" if rank == "1" else "nothing of a library is replaced by this\n")


def test_a_module(program, capsys, monkeypatch):
    monkeypatch.syspath_prepend(program.parent)
    run("name", accelerate, {"cpu": "help"}, ["--cpu", "-m", "program", "--steps", "5"])
    assert capsys.readouterr().out == "__main__ ['--steps', '5'] beside\n"
    assert sys.argv[1:] == ["--steps", "5"]


def test_a_program_that_fails_is_reported_too(program, capsys):
    program.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="3"):
        run("name", accelerate, {"cpu": "help"}, ["--cpu", str(program)])
    assert "nothing of a library" in capsys.readouterr().err


def test_without_a_program(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("gla_core.compat.fla", accelerate, {"cpu": "help"}, ["--cpu"])
    assert "usage: python -m gla_core.compat.fla [-h] [--cpu] [-m] program ..." in capsys.readouterr().err
