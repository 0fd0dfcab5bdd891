"""Cases, rows and baselines on a CPU."""

import dataclasses
import json
import subprocess

import pytest
import torch

import gla_core as gla
from gla_core.bench import baselines, first_call, first_call_process, measure, suite
from gla_core.bench.suite import Case, Row
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error
from gla_core.dispatch import registry
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.ops import PUBLIC_OPS
from gla_core.workloads.named import Workload, select

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def named(op, name):
    (workload,) = [w for w in select(op) if w.name == name]
    return workload


SHORT, STEP = named("chunk_gla", "short"), named("recurrent_gla_step", "pool")


def row_of(workload, backend, direction, **fields):
    return Row(workload=workload, op="chunk_gla", backend=backend, direction=direction, **fields)


@pytest.mark.usefixtures("only_reference")
@pytest.mark.parametrize(
    ("workload", "direction"),
    [
        *(
            (named(op, name), direction)
            for op, name in (("chunk_gla", "short"), ("online_softmax", "small"), ("softmax_attention", "grouped"))
            for direction in ("forward", "forward+backward")
        ),
        (STEP, "step"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.op,
)
def test_a_row_of_each_op_and_direction(workload, direction):
    row = suite.measure_case(Case(workload, "auto", direction), CPU, 1e10, 0.005)
    assert (row.workload, row.op, row.direction, row.error) == (workload.name, workload.op, direction, None)
    assert row.backend == "reference"  # the backend that ran, not the request
    bytes_moved = suite.floor_bytes(workload.op, workload.sizes, direction == "forward+backward")
    assert row.gigabytes_per_second == pytest.approx(bytes_moved / row.seconds / 1e9)
    assert row.floor_fraction == pytest.approx(bytes_moved / 1e10 / row.seconds)
    assert row.calls >= 3


def test_host_time_has_no_floor():
    row = suite.measure_case(Case(STEP, "reference", "host"), CPU, 1e10, 0.005)
    assert row.error is None
    assert 0 < row.seconds < 1
    assert (row.gigabytes_per_second, row.floor_fraction) == (None, None)


def test_rows_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        row_of("a", "b", "forward").seconds = 1.0


@pytest.mark.parametrize(
    ("name", "capabilities", "direction", "message"),
    [
        ("narrow", {"value_widths": range(1, 8)}, "forward", "narrow: computes V from 1 to 7; V is 16"),
        ("faulty", {}, "forward", "MemoryError: there is not enough"),
        ("half", {}, "forward+backward", "half: does not implement chunk_gla_bwd"),
        ("eager", {}, "step_graph", "eager: cannot be captured into a CUDA graph"),
    ],
)
def test_a_refusal_or_an_exception_is_the_rows_error(name, capabilities, direction, message):
    ops = {"chunk_gla_fwd": _fwd, "recurrent_gla_step": _step}
    with gla.register(Backend(name, "1", ops, Capabilities(**capabilities))):
        row = suite.measure_case(Case(STEP if direction == "step_graph" else SHORT, name, direction), CPU)
    assert (row.backend, row.seconds) == (name, None)
    assert message in row.error


def _fwd(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every):
    raise MemoryError("there is not enough")


def test_an_unknown_backend_is_the_rows_error():
    row = suite.measure_case(Case(SHORT, "refrence", "forward"), CPU)
    assert row.error.startswith("UnknownBackendError")


def test_a_graph_needs_a_gpu():
    pair = Case(SHORT, "reference", "forward+backward_graph")
    for case in (Case(STEP, "reference", "step_graph"), Case(SHORT, "reference", "forward_graph"), pair):
        assert suite.measure_case(case, CPU).error == "RuntimeError: a CUDA graph needs a CUDA device, not cpu"


def _step(q, k, v, g, state, scale, state_indices, inplace):
    raise AssertionError("nothing is to run")


def test_ratios_are_baseline_over_row():
    rows = [
        row_of("a", "fla", "forward", seconds=6.0),
        row_of("a", "mine", "forward", seconds=2.0),
        row_of("a", "mine", "forward+backward", seconds=1.0),
        row_of("b", "mine", "forward", error="no"),
        row_of("a", "loop", "forward", seconds=1.0),
    ]
    ratios = [row.ratio_to for row in suite.with_ratios(rows)]
    assert ratios == [{"loop": pytest.approx(1 / 6)}, {"loop": 0.5, "fla": 3.0}, {}, {}, {"fla": 6.0}]


def test_cases_put_baselines_first():
    small = named("online_softmax", "small")
    cases = suite.cases([SHORT, STEP, small], CPU, ["reference"])
    assert [(c.workload.op, c.backend, c.direction) for c in cases] == [
        ("chunk_gla", "loop", "forward"),
        ("chunk_gla", "reference", "forward"),
        ("chunk_gla", "loop", "forward+backward"),
        ("chunk_gla", "reference", "forward+backward"),
        ("recurrent_gla_step", "loop", "step"),
        ("recurrent_gla_step", "reference", "step"),
        ("online_softmax", "torch", "forward"),
        ("online_softmax", "reference", "forward"),
        ("online_softmax", "torch", "forward+backward"),
        ("online_softmax", "reference", "forward+backward"),
    ]


def test_cases_without_baselines_are_all_backends_that_implement_the_op():
    with gla.register(Backend("faulty", "1", {"chunk_gla_fwd": _fwd})):
        chunks, steps = (suite.cases([w], CPU, None, ["forward", "step"], False) for w in (SHORT, STEP))
    assert {"reference", "faulty"} <= {c.backend for c in chunks}
    assert "faulty" not in {c.backend for c in steps}


def test_cases_on_a_gpu_add_graphs_and_fla(monkeypatch):
    monkeypatch.setattr(baselines, "has_fla", lambda: True)
    cases = suite.cases([STEP], CUDA, ["mine"])
    assert [(c.backend, c.direction) for c in cases] == [
        ("fla", "step"),
        ("mine", "step"),
        ("fla", "step_graph"),
        ("mine", "step_graph"),
    ]
    monkeypatch.setattr(baselines, "has_fla", lambda: False)
    assert {c.backend for c in suite.cases([STEP], CUDA, ["mine"])} == {"mine"}
    directions = ["forward_graph", "forward+backward_graph"]
    cases = suite.cases([SHORT], CUDA, ["reference"], directions)
    assert [(c.backend, c.direction) for c in cases] == [("reference", direction) for direction in directions]
    assert suite.cases([SHORT], CPU, ["mine"], directions) == []


def test_default_workloads():
    on_cpu, on_cuda = suite.default_workloads(None, CPU), suite.default_workloads("chunk_gla", CUDA)
    assert all("ci" in w.tags and not suite.is_empty(w) for w in on_cpu)
    assert {"no_token", "empty_batch", "nothing"}.isdisjoint(w.name for w in on_cpu)
    assert {w.op for w in on_cpu} == set(PUBLIC_OPS)
    assert "train_b8_t4096_h16" in [w.name for w in on_cuda]
    assert "short" not in [w.name for w in on_cuda]


def test_a_call_with_backward_returns_the_gradient_of_every_input():
    gradients = suite.make_call(SHORT, "reference", "forward+backward", CPU)()
    shapes = [x.shape for x in suite.leaves(suite.make_arguments(SHORT, CPU))]
    assert [x.shape for x in gradients] == shapes
    assert len(shapes) == 5  # q k v g and the state


def test_a_baseline_may_leave_out_a_gradient(monkeypatch):
    def loop(g, **others):
        return baselines.loop_chunk_gla(g=g.detach(), **others)

    monkeypatch.setitem(suite.BASELINES, "loop", {"chunk_gla": loop})
    gradients = suite.make_call(SHORT, "loop", "forward+backward", CPU)()
    assert len(gradients) == len(suite.leaves(suite.make_arguments(SHORT, CPU))) - 1


@pytest.mark.parametrize("workload", [w for w in select("chunk_gla", ["ci"]) if w.sizes.get("T", 1) < 100])
def test_the_chunk_loop_is_right(workload):
    arguments = suite.make_arguments(workload, CPU)
    outputs = baselines.loop_chunk_gla(**arguments)
    wanted = arguments.pop("output_final_state")
    expected = oracle.chunk_gla(**arguments)
    assert len(outputs) == 1 + wanted
    for out, ref in zip(outputs, expected, strict=False):
        assert relative_error(out, ref) < 1e-5


@pytest.mark.parametrize("workload", select("recurrent_gla_step", ["ci"]), ids=lambda w: w.name)
def test_the_step_loop_is_right_and_in_place(workload):
    ours, theirs = (suite.make_arguments(workload, CPU) for _ in range(2))
    o, state = baselines.loop_recurrent_gla_step(**ours)
    o_ref, state_ref = gla.recurrent_gla_step(**theirs, backend="reference")
    assert state is ours["state"]
    torch.testing.assert_close((o, state), (o_ref, state_ref))


@pytest.mark.parametrize("workload", select("softmax_attention", ["ci"]), ids=lambda w: w.name)
def test_torchs_attention_is_the_same_attention(workload):
    arguments = suite.make_arguments(workload, CPU)
    (o,) = baselines.torch_softmax_attention(**arguments)
    assert relative_error(o, oracle.softmax_attention(**arguments)[0]) < 1e-5


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradients_reach_the_results_that_all_rows_of_a_call_have(backend, monkeypatch):
    """PyTorch's attention returns o alone, so a row with a gradient of lse beside it would compute more."""
    passed, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda outputs, *args, **options: (passed.append(len(outputs)), grad(outputs, *args, **options))[1],
    )
    suite.make_call(named("softmax_attention", "small"), backend, "forward+backward", CPU)()
    assert passed == [1]


def test_fla_says_what_it_cannot_do(monkeypatch):
    grouped = suite.make_arguments(named("chunk_gla", "grouped"), CPU)
    with pytest.raises(ValueError, match="no grouped queries; q has 6 heads and k has 2"):
        baselines.fla_chunk_gla(**grouped)
    values = suite.make_arguments(named("chunk_gla", "grouped_values"), CPU)
    with pytest.raises(ValueError, match="no grouped values; v has 6 heads and k has 2"):
        baselines.fla_chunk_gla(**values)
    ungated = suite.make_arguments(named("chunk_gla", "ungated"), CPU)
    with pytest.raises(ValueError, match="g is None"):
        baselines.fla_chunk_gla(**ungated)
    monkeypatch.setattr(baselines, "_fla_ops", FakeFla)
    with pytest.raises(ValueError, match="no pool of states"):
        baselines.fla_recurrent_gla_step(**suite.make_arguments(STEP, CPU))


class FakeFla:
    """Stands for a module of fla.ops; its functions take the gate by the name that FLA's do."""

    def __init__(self, name):
        self.gates = {"gla": ("g", "gk"), "simple_gla": ("g", "g_gamma")}[name]

    def chunk_gla(self, *, q, k, v, initial_state, output_final_state, cu_seqlens=None, **gate):
        ((name, g),) = gate.items()
        assert name in self.gates
        assert (name == "g_gamma") == (g.ndim == 1)
        return gla.chunk_gla(q, k, v, g, None, initial_state, output_final_state, cu_seqlens)

    chunk_simple_gla = fused_recurrent_gla = fused_recurrent_simple_gla = chunk_gla


def test_fla_is_called_by_its_public_names(monkeypatch):
    monkeypatch.setattr(baselines, "_fla_ops", FakeFla)
    for workload in ("per_head", "constant"):
        inputs = suite.make_arguments(named("chunk_gla", workload), CPU)
        inputs["q"] = inputs["k"]  # without groups, which FLA has not
        inputs["v"], state = inputs["v"][:, :, : inputs["k"].shape[2]], inputs["initial_state"]
        torch.testing.assert_close(baselines.fla_chunk_gla(**inputs), gla.chunk_gla(**inputs))
        token = {name: x if x is None or x.ndim == 1 else x[:, 0] for name, x in inputs.items() if name in "qkvg"}
        expected = gla.recurrent_gla_step(**token, state=state)
        actual = baselines.fla_recurrent_gla_step(**token, state=state, slots=None, inplace=False)
        torch.testing.assert_close(actual, expected)
    arguments = suite.make_arguments(SHORT, CPU)
    torch.testing.assert_close(baselines.fla_chunk_gla(**arguments), gla.chunk_gla(**arguments))
    step = suite.make_arguments(named("recurrent_gla_step", "small"), CPU)
    torch.testing.assert_close(baselines.fla_recurrent_gla_step(**step), gla.recurrent_gla_step(**step))


def test_the_first_call_of_a_process(tmp_path):
    seconds = first_call.first_call(SHORT, "reference", CPU, tmp_path)
    assert set(seconds) == {"first_call", "first_backward"}
    assert all(0 < value < 60 for value in seconds.values())


def test_the_first_call_of_a_backend_without_a_backward():
    with gla.register(Backend("half", "1", {"chunk_gla_fwd": registry.get("reference").ops["chunk_gla_fwd"]})):
        assert set(first_call_process.first_calls(SHORT, "half", CPU)) == {"first_call"}


def test_a_first_call_that_fails_says_why(monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\n  a frame\nLookupError: no such backend\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"^LookupError: no such backend$"):
        first_call.first_call(STEP, "missing", CPU)


def test_the_first_call_has_a_cache_of_its_own(monkeypatch, tmp_path):
    seen = {}

    def run(command, env, **_):
        seen.update(command=command[1:], cache=env["TRITON_CACHE_DIR"])
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps({"first_call": 2.5}), "")

    monkeypatch.setattr(subprocess, "run", run)
    row = suite.measure_case(Case(STEP, "reference", "first_call"), CPU)
    assert (row.seconds, row.calls, row.error) == (2.5, 1, None)
    assert seen["command"] == [
        "-m",
        "gla_core.bench.first_call_process",
        "recurrent_gla_step",
        "pool",
        "reference",
        "cpu",
    ]
    first_call.first_call(STEP, "reference", CPU, tmp_path)
    assert seen["cache"] == str(tmp_path)


@pytest.mark.gpu
def test_rows_on_a_gpu():
    small = Workload("small", "chunk_gla", frozenset(), {"B": 1, "T": 64, "H": 2, "K": 32, "V": 32})
    step = Workload("small", "recurrent_gla_step", frozenset(), {"B": 2, "H": 2, "K": 32, "V": 32})
    bandwidth = measure.copy_bandwidth(CUDA)
    for case in suite.cases([small, step], CUDA, ["reference"], (*suite.TIMED, "host"), with_baselines=False):
        row = suite.measure_case(case, CUDA, bandwidth, 0.05)
        assert row.error is None, row
        assert 0 < row.floor_fraction < 1 if case.direction != "host" else row.floor_fraction is None
