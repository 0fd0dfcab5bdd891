"""gla explain --path: the functions that a call enters, and its launches."""

import json
import sys
from pathlib import Path

import pytest
import torch

import gla_core as gla
from gla_core.cli.calls import SHAPES, describe_call
from gla_core.cli.path import path_of
from gla_core.dispatch.backend import Backend, Capabilities, Prepared
from gla_core.dispatch.registry import get
from gla_core.ops import RUNS, OpSpec

DESIGN = Path(__file__).parents[2] / "docs/design.md"
SIZES = {"B": 1, "T": 4096, "H": 8, "K": 128, "V": 128, "N": 3, "L": 8, "ROWS": 8, "COLUMNS": 64}
STEPS_OF_THE_CORE = ["current_request", "run", "OpSpec.describe", "select"]
CHUNK_GLA = ("explain", "chunk_gla", "--shape", "1,64,2,16,32")


def call_of(op, device="cpu", assume=None):
    spec = RUNS[op][0]
    sizes = SIZES | ({"T": 4} if "slots" in spec.parameters else {})
    sizes |= {"V": 256} if op == "softmax_attention_bwd" else {}  # no library computes it
    shape = ",".join(str(sizes[name]) for name in SHAPES[spec.name])
    return describe_call(op, shape, dtype="bfloat16", device=device, assume=assume)


def softmax(name, prepare):
    """Returns a backend that prepares calls of online_softmax."""
    return Backend(name, "1", {"online_softmax": Prepared(prepare, ("x", "dim"))}, Capabilities())


def test_the_page_shows_the_path_of_a_call(run, monkeypatch):
    pytest.importorskip("triton")
    for name, value in (("COLUMNS", "72"), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):  # as on a narrow terminal
        monkeypatch.setenv(name, value)
    block = DESIGN.read_text(encoding="utf-8").split("```console\n$ gla ")[1].split("```")[0]
    command, _, output = block.replace("\\\n", "").partition("\n")
    assert run(*command.split()).output == output


@pytest.mark.parametrize(
    ("backend", "op"),
    [
        (name, op)
        for name in ("triton_fused", "parallel_scan")
        for op in sorted(RUNS)
        if RUNS[op][0].name in get(name).ops
    ],
)
def test_the_path_of_every_op_has_few_steps_and_ends_at_launches(op, backend):
    pytest.importorskip("triton")
    steps, launches = path_of(call_of(op, "auto", "H200"), backend, backend)
    functions = [step.function for step in steps]
    public = [op.removesuffix("_fwd")] if not op.endswith("_bwd") else []
    assert functions[: len(public) + 4] == public + STEPS_OF_THE_CORE
    assert functions[-1] == "UnrecordedCall.start"
    assert any(step.file.startswith("gla_triton_kernels/") and "prepare" in step.function for step in steps)
    assert len(steps) <= 12
    assert launches
    assert all(x.file.startswith("gla_triton_kernels/") and len(x.grid) == 3 for x in launches)


@pytest.mark.parametrize("op", sorted(RUNS))
def test_the_path_of_a_call_in_pytorch_ends_in_the_function_that_computes_it(op):
    steps, launches = path_of(call_of(op), "reference", "reference")
    in_core = op in ("online_softmax_bwd", "softmax_attention_bwd")
    assert steps[-1].file.startswith("gla_core/ops/attention/" if in_core else "gla_reference/")
    assert len(steps) <= 12
    assert launches == []


def test_the_launches_are_those_that_the_kernels_describe():
    pytest.importorskip("triton")
    from gla_triton_kernels.gla.sm90 import forward

    call = describe_call("chunk_gla", "8,4096,16,128,128", assume="H200")
    (launch,) = path_of(call, "triton_fused", "triton_fused").launches
    assert launch[:2] == ("gla_triton_kernels/gla/sm90/forward.py", forward._gla_forward_kernel.fn.__name__)
    assert str(launch).endswith(f"{launch.kernel}\n      grid={launch.grid}, num_warps=4, maxnreg=128")
    assert launch.grid == (8 * 16, 1, 1)


def test_a_step_is_shown_with_the_first_line_of_its_docstring():
    first = path_of(call_of("softmax_attention"), "reference", "reference").steps[0]
    line = "Computes softmax attention, differentiable in q, k and v through both results."
    assert first == ("gla_core/ops/attention/softmax_attention.py", "softmax_attention", line)


def test_json(run):
    result = run(*CHUNK_GLA, "--device", "cpu", "--backend", "reference", "--path", "--json")
    shown = json.loads(result.stdout)
    assert shown["path"][-1]["function"] == "chunk_gla_fwd"
    assert shown["launches"] == []
    assert shown["winner"] == "reference"
    assert "path" not in json.loads(run(*CHUNK_GLA, "--device", "cpu", "--json").stdout)


def test_logits_and_packed_sequences_have_a_path(run):
    numbers = ("--varlen", 3, "--gate", "head", "--gate-normalizer", 16, "--device", "cpu", "--backend", "reference")
    result = run(*CHUNK_GLA, *numbers, "--path")
    assert result.exit_code == 0
    assert "gla_reference/chunk_gla.py  chunk_gla_fwd\n" in result.output


def test_a_call_that_no_backend_can_run_has_no_path(run):
    result = run(*CHUNK_GLA, "--device", "cpu", "--dtype", "float64", "--backend", "triton_fused", "--path")
    assert result.exit_code == 1
    assert "no backend can run chunk_gla_fwd" in result.output
    assert "path:" not in result.output


def test_a_path_is_not_measured(run):
    result = run(*CHUNK_GLA, "--device", "cpu", "--path", "--measure")
    assert result.exit_code == 2
    assert "--path runs nothing; leave out --measure" in result.output


def test_nothing_remains_of_a_path():
    describe, profiler, prepared = OpSpec.describe, sys.getprofile(), []

    def prepare(call):
        prepared.append(call.device.type)
        return lambda x, dim: torch.empty_like(x)

    with gla.register(softmax("empty", prepare)):
        path_of(call_of("online_softmax"), "empty", "empty")
        gla.online_softmax(torch.empty(8, 64, dtype=torch.bfloat16, device="meta"), backend="empty")
    assert prepared == ["cpu", "meta"]
    assert (OpSpec.describe, sys.getprofile()) == (describe, profiler)


def test_a_prepared_function_that_needs_values_ends_the_path():
    def prepare(call):
        def compute(x, dim):
            return x.softmax(dim) * x.sum().item()

        return compute

    with gla.register(softmax("valued", prepare)):
        steps, launches = path_of(call_of("online_softmax"), "valued", "valued")
    assert steps[-1].function.endswith("prepare.compute")
    assert launches == []


def test_an_error_of_prepare_is_raised():
    def prepare(call):
        raise RuntimeError("no plan")

    with gla.register(softmax("planless", prepare)), pytest.raises(RuntimeError, match="no plan"):
        path_of(call_of("online_softmax"), "planless", "planless")


def prepare_rows(call):
    return plan_rows(call)


def plan_rows(call):
    return start_rows(["no launch"])


def start_rows(launches):
    return lambda x, dim: x


def test_functions_of_a_backend_are_steps_by_their_names():
    with gla.register(softmax("named", prepare_rows)):
        steps, launches = path_of(call_of("online_softmax"), "named", "named")
    assert [step.function for step in steps][5:] == ["prepare_rows", "plan_rows", "start_rows", "start_rows.<lambda>"]
    assert launches == []
