"""gla doctor."""

import importlib.metadata
import json
import platform
from types import SimpleNamespace

import pytest
import torch

import gla_core as gla
from gla_core import extras
from gla_core.cli import doctor
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.dispatch.environment import VARIABLES


def examine(run, exit_code):
    result = run("doctor", "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_all_is_well(run):
    result = run("doctor")
    assert result.exit_code == 0
    for text in (platform.python_version(), gla.__version__, torch.__version__, "triton", "GLA_BACKEND", "reference"):
        assert text in result.output
    assert result.output.endswith("all is well\n")


def test_json_of_a_healthy_installation(run):
    report = examine(run, 0)
    assert report["problems"] == []
    assert report["quarantine"] == {}
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0] == {"device": "cpu", "threads": torch.get_num_threads()}
    assert report["request"] == [{"op": "*", "request": "auto", "source": "default"}]
    assert [row["name"] for row in report["variables"]] == list(VARIABLES)
    assert "reference" in [row["name"] for row in report["backends"]]


def test_variables_and_what_comes_of_them(run, monkeypatch):
    monkeypatch.setenv("GLA_BACKEND", "chunk_gla_fwd=reference")
    monkeypatch.setenv("GLA_CHECK", "1")
    report = examine(run, 0)
    rows = {row["name"]: row for row in report["variables"]}
    assert rows["GLA_BACKEND"]["value"] == "chunk_gla_fwd=reference"
    assert rows["GLA_BACKEND"]["effect"].startswith("the default request is chunk_gla_fwd=reference;")
    assert rows["GLA_CHECK"]["effect"] == "tensor values are checked"
    assert rows["GLA_BLOCK_PLUGINS"] == {
        "name": "GLA_BLOCK_PLUGINS",
        "value": None,
        "effect": "every plugin is imported",
    }
    assert {"op": "chunk_gla_fwd", "request": "reference", "source": "GLA_BACKEND"} in report["request"]
    assert {"op": "*", "request": "auto", "source": "default"} in report["request"]


def test_what_backends_say_of_themselves(run, fresh_registry):
    def broken():
        raise RuntimeError("no idea")

    ops = {"online_softmax": lambda x, dim: x}
    with (
        gla.register(Backend("slow", "1.0", ops, notes=lambda: ["calls are slow here"])),
        gla.register(Backend("broken", "1.0", ops, notes=broken)),
    ):
        assert "slow: calls are slow here" in run("doctor").output
        notes = [row for row in examine(run, 0)["notes"] if row["backend"] in ("slow", "broken")]
    raised = {"backend": "broken", "note": "its notes() raised RuntimeError: no idea"}
    assert notes == [{"backend": "slow", "note": "calls are slow here"}, raised]


SOFTMAX = {"online_softmax": lambda x, dim: x}
ON_CUDA = Capabilities(devices=frozenset({"cuda"}), min_compute_capability=(8, 0))


def limits(run):
    return [line for line in examine(run, 0)["limits"] if "gpu_alone" in line or "anywhere" in line]


@pytest.fixture
def gpu_alone(fresh_registry, monkeypatch):
    """Registers a backend for CUDA devices of compute capability 8.0, and another with an op that runs anywhere."""
    some = Backend("anywhere", "1.0", SOFTMAX, ON_CUDA, op_capabilities={"online_softmax": Capabilities()})
    with gla.register(Backend("gpu_alone", "1.0", SOFTMAX, ON_CUDA)), gla.register(some):
        yield


def test_a_backend_that_no_device_here_can_run(run, monkeypatch, gpu_alone):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert limits(run) == ["no CUDA device: gpu_alone cannot run"]
    assert "\nno CUDA device: gpu_alone cannot run\n" in run("doctor").output


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), ["no CUDA device of compute capability 8.0: gpu_alone cannot run"]), ((9, 0), [])],
)
def test_a_gpu_that_is_too_old(monkeypatch, gpu_alone, capability, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [line for line in doctor.limits() if "gpu_alone" in line or "anywhere" in line] == expected


@pytest.mark.parametrize(
    ("name", "capability", "hip", "kernels"),
    [
        ("NVIDIA H100 PCIe", (9, 0), None, "measured"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), None, "compiled, not run"),
        ("AMD Instinct MI300X", (9, 4), "6.4.0", "compiled, not run"),
        ("AMD Instinct MI250X", (9, 0), "6.4.0", "compiled, not run"),
    ],
)
def test_a_gpu_on_which_nothing_was_run_is_named_and_reports_are_asked_for(monkeypatch, name, capability, hip, kernels):
    major, minor = capability
    actual = SimpleNamespace(name=name, multi_processor_count=8, major=major, minor=minor, total_memory=2**36)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: actual)
    report = doctor.examine()
    assert [device.get("kernels") for device in report["devices"]] == [None, kernels, kernels]
    asked = [f"{name}: the kernels are compiled for such a GPU in tests, and were not run on one. {doctor.WANTED}"]
    assert report["reports wanted"] == (asked if kernels == "compiled, not run" else [])


def test_extras_that_are_missing(run, monkeypatch):
    def requires(distribution):
        return ["torch>=2", "rich>=13; extra == 'cli'", "far-away>=1; extra == 'bench'", "also>=2; extra == 'dev'"]

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert extras.extras() == {"cli": ["rich>=13"], "bench": ["far-away>=1"]}
    assert examine(run, 0)["missing extras"] == {"bench": ["far-away>=1"]}
    line = "extra 'bench': far-away>=1 not installed; pip install '.[bench]' in a clone of gla-core, or pip install"
    assert line in run("doctor").output


def test_an_unknown_variable(run, monkeypatch):
    monkeypatch.setenv("GLA_BACKND", "reference")
    report = examine(run, 1)
    assert report["problems"] == ["unknown environment variable GLA_BACKND; did you mean 'GLA_BACKEND'?"]
    assert "did you mean 'GLA_BACKEND'?" in report["variables"][-1]["effect"]


def test_a_backend_that_is_not_installed(run, monkeypatch):
    monkeypatch.setenv("GLA_BACKEND", "refrence")
    (problem,) = examine(run, 1)["problems"]
    assert problem.startswith("GLA_BACKEND: unknown backend 'refrence'; did you mean 'reference'?")


def test_a_setting_that_cannot_be_read(run, monkeypatch):
    monkeypatch.setenv("GLA_CHECK", "maybe")
    assert examine(run, 1)["problems"] == ["GLA_CHECK is 'maybe'; expected 0 or 1"]


def test_every_backend_blocked(run, monkeypatch):
    names = {info.plugin for info in gla.backends()}
    monkeypatch.setenv("GLA_BLOCK_PLUGINS", ",".join(names))
    report = examine(run, 1)
    assert report["backends"] == []
    assert report["problems"][0].startswith("no backend works")


def test_a_broken_plugin_is_shown_with_its_traceback(run, broken_plugin):
    error = "ModuleNotFoundError: No module named 'module_that_does_not_exist'"
    report = examine(run, 1)
    assert report["problems"] == [f"plugin {broken_plugin!r} failed to load: {error}"]
    assert report["quarantine"][broken_plugin].startswith("Traceback (most recent call last)")
    text = run("doctor")
    assert text.exit_code == 1
    assert "Traceback (most recent call last)" in text.output
    assert "in _call_hook" in text.output
    assert text.output.endswith("something is wrong\n")
