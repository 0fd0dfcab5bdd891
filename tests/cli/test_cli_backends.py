"""gla backends, gla --version, help, and a gla without its extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, Capabilities


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
        "ops": ["online_softmax"],
        "devices": ["cpu", "cuda"],
        "dtypes": ["float32", "float16"],
        "plugin": "register()",
        "load error": None,
    }
    assert rows["reference"]["devices"] == ["any"]


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


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"gla_core {gla.__version__}\n")


@pytest.mark.parametrize("command", ["backends", "explain", "doctor", "demo"])
def test_every_help_has_an_example(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"gla {command}" in result.output.split("Example")[1]


def test_an_unknown_command_is_a_usage_error(run):
    assert run("backend").exit_code == 2


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_it_says_how_to_install_them(package):
    code = f"import sys; sys.modules[{package!r}] = None; from gla_command import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert "pip install 'gla-core[cli]'" in done.stderr
    assert package in done.stderr
