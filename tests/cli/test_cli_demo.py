"""gla demo as a command; the demo itself is tested in tests/demo."""

import pytest
import torch

import gla_core as gla
from gla_core.demo import run as demo_run


@pytest.fixture
def asked(monkeypatch):
    """The options of each run of the demo, which does not train."""
    options: list[demo_run.Options] = []
    monkeypatch.setattr(demo_run, "run_demo", lambda o, console: options.append(o) or True)
    return options


def test_options_reach_the_demo(run, asked):
    result = run(
        *("demo", "--steps", 3, "--seconds", 5, "--seed", 7, "--device", "cpu"),
        *("--prompt", "class ", "--tokens", 9, "--temperature", 0.1),
    )
    assert result.exit_code == 0
    assert asked == [demo_run.Options(torch.device("cpu"), 3, 5.0, 7, "class ", 9, 0.1)]


def test_the_default_is_a_full_training(run, asked):
    assert run("demo", "--device", "cpu").exit_code == 0
    assert asked == [demo_run.Options(torch.device("cpu"))]


@pytest.mark.parametrize(
    ("outcome", "exit_code"),
    [(False, 1), (KeyboardInterrupt(), 130), (gla.NoBackendError("nobody"), 1), (FileNotFoundError("no sources"), 1)],
)
def test_exit_codes(run, monkeypatch, outcome, exit_code):
    def run_demo(options, console):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(demo_run, "run_demo", run_demo)
    assert run("demo", "--device", "cpu").exit_code == exit_code


def test_bad_usage(run, asked, monkeypatch, set_environment):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("demo", "--steps", 0).exit_code == 2
    assert run("demo", "--device", "gpu").exit_code == 2
    assert run("demo", "--device", "cuda").exit_code == 2
    set_environment(GLA_BACKEND="refrence")
    result = run("demo")
    assert result.exit_code == 2
    assert "did you mean 'reference'?" in result.output
    assert asked == []
