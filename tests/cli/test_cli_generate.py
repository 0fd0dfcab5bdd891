"""gla generate as a command; generation is tested in plugins/gla_transformers/tests, which need transformers."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each run, which does not generate."""
    options: list = []
    text = SimpleNamespace(Options=lambda *arguments: arguments, run_generate=options.append)
    monkeypatch.setitem(sys.modules, "gla_transformers", ModuleType("gla_transformers"))
    monkeypatch.setitem(sys.modules, "gla_transformers.text", text)
    return options


def test_options_reach_it(run, asked):
    result = run(
        *("generate", "folder", "--prompt", "class ", "--max-new-tokens", 9, "--temperature", 0.1, "--seed", 7),
        *("--device", "cpu", "--dtype", "bfloat16"),
    )
    assert result.exit_code == 0, result.output
    assert run("generate", "folder", "--prompt", "x", "--device", "cpu").exit_code == 0
    cpu = torch.device("cpu")
    assert asked == [
        (Path("folder"), "class ", cpu, 9, 0.1, 7, torch.bfloat16),
        (Path("folder"), "x", cpu, 100, 0.7, 0, None),
    ]


def test_a_prompt_whose_bytes_the_locale_does_not_decode(run, asked):
    undecoded = "Café".encode().decode("ascii", "surrogateescape")
    assert run("generate", "folder", "--prompt", undecoded, "--device", "cpu").exit_code == 0
    assert [options[1] for options in asked] == ["Café"]
    result = run("generate", "folder", "--prompt", "Caf\udcff", "--device", "cpu")
    assert (result.exit_code, len(asked)) == (2, 1)
    assert "'--prompt': expected text in UTF-8 ('utf-8' codec can't decode byte 0xff" in result.output


def test_without_the_package_it_says_what_to_install(run, monkeypatch):
    for name in ("gla_transformers", "gla_transformers.text"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run("generate", "folder", "--prompt", "x")
    assert result.exit_code == 2
    assert result.output.endswith("pip install ./plugins/gla_transformers in a clone of gla-core\n")
    assert result.output.count("\n") == 1


def test_bad_usage(run, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wrong in (["--temperature", -1], ["--max-new-tokens", 0], ["--device", "cuda"], ["--dtype", "int8"]):
        assert run("generate", "folder", "--prompt", "x", *wrong).exit_code == 2
    assert run("generate", "folder").exit_code == 2
    assert asked == []
