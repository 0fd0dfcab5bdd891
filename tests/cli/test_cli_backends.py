"""gla backends, gla --version, help, and a gla without its extra. Commands that do not import torch are quick."""

import json
import os
import runpy
import subprocess
import sys
import warnings

import pytest
import torch

import gla_core as gla
from gla_core.bench import measure
from gla_core.dispatch.backend import Backend, Capabilities
from gla_tools import command
from gla_tools.command import main


def test_the_table_shows_each_backend(run, own_backends):
    result = run("backends")
    assert result.exit_code == 0
    for text in ("name", "version", *own_backends, "chunk_gla_fwd", "recurrent_gla_step", "any", "bfloat16"):
        assert text in result.output
    assert "load error" not in result.output


def test_json_holds_every_field(run):
    mine = Backend(
        "mine",
        "2.5",
        {"online_softmax": lambda x, dim: x},
        Capabilities(devices=frozenset({"cuda", "cpu"}), dtypes=frozenset({torch.float16, torch.float32})),
    )
    with gla.register(mine):
        result = run("backends", "--json")
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["mine"] == {
        "name": "mine",
        "version": "2.5",
        "ops": ["online_softmax", "online_softmax_bwd"],
        "devices": ["cpu", "cuda"],
        "dtypes": ["float32", "float16"],
        "gates": [],
        "plugin": "register()",
        "load error": None,
    }
    assert rows["reference"]["devices"] == ["any"]
    assert rows["reference"]["gates"] == ["constant", "head", "key"]


def test_a_broken_plugin_is_shown_and_makes_the_exit_code_1(run, broken_plugin):
    error = "ModuleNotFoundError: No module named 'module_that_does_not_exist'"
    table = run("backends")
    assert table.exit_code == 1
    assert "reference" in table.output
    assert error in table.output
    listed = run("backends", "--json")
    assert listed.exit_code == 1
    (row,) = [row for row in json.loads(listed.stdout) if row["load error"]]
    assert (row["name"], row["version"], row["load error"]) == (broken_plugin, None, error)


def test_settings_that_cannot_be_read_are_a_usage_error(run, monkeypatch):
    monkeypatch.setenv("GLA_CHECK", "maybe")
    result = run("backends")
    assert result.exit_code == 2
    assert "GLA_CHECK is 'maybe'; expected 0 or 1" in result.output


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_shows_every_name_whole(run, monkeypatch, own_backends, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = run("backends").output
    assert max(map(len, table.splitlines())) <= columns
    words = table.replace(",", "").split()
    assert {*own_backends, "recurrent_gla_step", "softmax_attention", "bfloat16"} <= set(words)


def test_a_wider_terminal_needs_fewer_lines(run, monkeypatch):
    lines = {}
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines[columns] = len(run("backends").output.splitlines())
    assert lines[120] < 0.7 * lines[80]


def test_what_is_piped_has_a_line_for_each_backend(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = run("backends").output.splitlines()
    (line,) = [line for line in lines if line.strip().startswith("reference")]
    assert {"chunk_gla_fwd", "recurrent_gla_step", "softmax_attention"} <= set(line.replace(",", "").split())


def test_python_m_gla_core_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gla_core", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("gla_core", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"gla_core {gla.__version__}\n"


COMMANDS = ("backends", "explain", "doctor", "bench", "calibrate", "demo", "conformance", "new-backend")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"gla {command}" in result.output.split("Example")[1]


def test_an_unknown_command_is_a_usage_error(run):
    assert run("backend").exit_code == 2


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_and_version_import_no_torch():
    done = python(
        "import sys; from gla_tools.command import app\n"
        f"for arguments in (['--version'], ['--help'], *([name, '--help'] for name in {COMMANDS})):\n"
        "    app(arguments, prog_name='gla', standalone_mode=False)\n"
        "print(sorted({'torch', 'gla_core'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "Usage: gla conformance" in done.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_it_says_how_to_install_them(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(command.__file__)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith(f"gla needs the package {package!r}: pip install '.[cli]' in a clone of gla-core, or pip in")
    assert {"'rich>=13'", "'typer>=0.15'"} <= set(said.split())
    assert "gla-core[" not in said  # it is on no package index


@pytest.fixture
def outcome(monkeypatch, capfd):
    """A function: `outcome(stdout, *arguments)` returns the exit code and the standard error of `gla`."""

    def outcome(stdout, *arguments):
        monkeypatch.setattr(sys, "argv", ["gla", *arguments])
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stdout)
            patched.setattr(warnings, "formatwarning", warnings.formatwarning)
            with pytest.raises(SystemExit) as end:
                main()
            if stdout is None:
                sys.stdout.close()
        return end.value.code, capfd.readouterr().err

    return outcome


WRITING = (("backends",), ("explain", "online_softmax", "--shape", "2,3", "--device", "cpu"), ("doctor",), ("--help",))


@pytest.mark.parametrize("arguments", WRITING, ids=lambda arguments: arguments[0])
def test_closed_standard_output_is_no_error(outcome, arguments):
    assert outcome(None, *arguments) == (0, "")


@pytest.mark.parametrize("arguments", WRITING[:-1], ids=lambda arguments: arguments[0])
def test_a_reader_that_stops_reading_ends_the_command_quietly(outcome, arguments):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody_reads:
        assert outcome(nobody_reads, *arguments) == (1, "")


def test_a_table_is_printed_in_an_encoding_without_its_signs(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    wanted = ("bench", "--workload", "chunk_gla/short", "--direction", "forward", "--seconds", "0.001")
    with open(tmp_path / "table", "w", encoding="ascii") as table:
        code, message = outcome(table, *wanted, "--backend", "reference", "--device", "cpu")
    assert (code, message) == (0, "")
    assert "? loop: how many times as fast" in (tmp_path / "table").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", WRITING, ids=lambda arguments: arguments[0])
def test_a_full_disk_is_a_sentence(outcome, arguments):
    with open("/dev/full", "w") as full:
        code, message = outcome(full, *arguments)
    assert code == 1
    assert message.startswith("gla")
    assert message.endswith("No space left on device\n")
    assert len(message.splitlines()) == 1
