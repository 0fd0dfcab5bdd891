"""Measuring and fitting, with backends whose calls take time on a fake clock."""

import dataclasses
import json

import pytest
import torch

import gla_core as gla
from gla_core.bench import calibrate, measure
from gla_core.bench.calibrate import Sample, Task
from gla_core.dispatch import calibration
from gla_core.dispatch.backend import Backend, CostModel, OpCall

CPU = torch.device("cpu")
TRUE = {"launch": 1e-4, "rate": 2e7}
SHIPPED = {"launch": 3e-5, "rate": 1e8}
OTHERS = {"NVIDIA H200": {"online_softmax": SHIPPED}, "cpu": {"softmax_attention": {"x": 1.0}}}


def seconds(call, c):
    return c["launch"] + call.dims["rows"] * call.dims["columns"] / c["rate"]


@pytest.fixture
def made_up(monkeypatch):
    """A function that registers a backend; its softmax takes the time of the formula with the true constants."""
    now, handles = [0.0], []
    monkeypatch.setattr(measure, "clock", lambda: now[0])

    def register(name="mine", true=TRUE, fails_at=None, **fields):
        def online_softmax(x, dim):
            rows, columns = x.shape
            if columns == fails_at:
                raise RuntimeError("out of paper\nand ink")
            now[0] += true["launch"] + rows * columns / true["rate"]
            return torch.empty_like(x)

        fields.setdefault("cost", CostModel(seconds, {"cpu": {"online_softmax": SHIPPED}}))
        backend = Backend(name, "1.0", {"online_softmax": online_softmax}, **fields)
        handles.append(gla.register(backend))
        return backend

    yield register
    for handle in handles:
        handle.unregister()


@pytest.fixture(autouse=True)
def empty_cache(isolated, set_environment, tmp_path):
    set_environment(GLA_CACHE_DIR=str(tmp_path / "cache"))


def measured(budget=0.01):
    return [calibrate.measure_task(task, budget) for task in calibrate.plan(CPU, ["mine"])]


def test_the_plan_is_every_shape_of_every_op_that_the_backend_has(made_up):
    made_up()
    tasks = calibrate.plan(CPU, ["mine"])
    assert {(task.backend, task.call.op) for task in tasks} == {("mine", "online_softmax")}
    assert [task.call for task in tasks] == calibrate.shapes("online_softmax", CPU)
    assert calibrate.plan(CPU, ["mine"], ["chunk_gla_fwd"]) == []
    assert all(task in calibrate.plan(CPU) for task in tasks)


def test_what_a_backend_refuses_or_has_no_constants_for_is_not_planned(made_up):
    made_up(supports=lambda call: "only short rows" if call.dims["columns"] > 1000 else None)
    assert max(task.call.dims["columns"] for task in calibrate.plan(CPU, ["mine"])) <= 1000
    made_up("bare", cost=CostModel(seconds))
    assert calibrate.plan(CPU, ["bare"]) == []
    made_up("plain", cost=lambda call: 1.0)
    assert "plain" not in {task.backend for task in calibrate.plan(CPU)}


def test_bad_names(made_up):
    made_up("plain", cost=lambda call: 1.0)
    with pytest.raises(ValueError, match="backend 'plain' has no cost model"):
        calibrate.plan(CPU, ["plain"])
    with pytest.raises(LookupError, match="unknown backend 'plane'; did you mean 'plain'"):
        calibrate.plan(CPU, ["plane"])
    with pytest.raises(LookupError, match="unknown op 'online_sofmax'; did you mean 'online_softmax'"):
        calibrate.plan(CPU, [], ["online_sofmax"])


def test_measured_times_are_the_backends(made_up):
    made_up()
    for sample in measured():
        assert sample.seconds == pytest.approx(seconds(sample.call, TRUE))
        assert sample.error is None


def test_a_shape_that_fails_is_a_sample_with_its_error(made_up):
    made_up(fails_at=4096)
    (failed,) = [sample for sample in measured() if sample.error is not None]
    assert failed.seconds is None
    assert failed.error == "RuntimeError: out of paper"
    assert failed.call.dims["columns"] == 4096


def test_a_call_that_would_take_too_long_by_the_shipped_constants_is_left_out(made_up):
    made_up()
    budget = 2**16 / SHIPPED["rate"]  # ten of these are less than a call of 2**20 elements takes
    each = measured(budget=budget)
    errors = {x.call.dims["rows"] * x.call.dims["columns"]: x.error for x in each}
    assert errors.pop(2**20) == f"predicted to take over {10 * budget:.2g} s a call"
    assert set(errors.values()) == {None}


def test_the_quickest_sample_counts(made_up):
    made_up()
    sample = measured()[0]
    slower, failed = (
        dataclasses.replace(sample, seconds=2 * sample.seconds),
        dataclasses.replace(sample, seconds=None, error="no"),
    )
    assert calibrate.quickest([slower, sample, failed]) == sample
    assert calibrate.quickest([failed, failed]) == failed


def test_an_interrupt_is_no_sample(made_up):
    made_up()
    task = calibrate.plan(CPU, ["mine"])[0]

    def interrupted(x, dim):
        raise KeyboardInterrupt

    with gla.register(Backend("other", "1", {"online_softmax": interrupted})), pytest.raises(KeyboardInterrupt):
        calibrate.measure_task(Task("other", task.call))


def test_the_fit_finds_the_true_constants(made_up):
    made_up()
    (fit,) = calibrate.fit_samples(measured(), CPU)
    assert (fit.backend, fit.op, fit.samples) == ("mine", "online_softmax", 7)
    assert fit.constants == pytest.approx(TRUE, rel=0.01)
    assert fit.before > 2
    assert 1 <= fit.median <= fit.worst < 1.02


def test_backends_that_run_the_same_kernels_are_fitted_together(made_up):
    def halved(call, c):
        return c["launch"] + call.dims["rows"] * call.dims["columns"] / c["rate"] / 2

    common, shipped = {"online_softmax": "ours"}, {"cpu": {"online_softmax": {**SHIPPED, "own": 1.0}}}
    made_up(cost=CostModel(seconds, {"cpu": {"online_softmax": SHIPPED}}, kernels=common))
    samples = measured()
    made_up("other", cost=CostModel(halved, shipped, kernels=common))
    made_up("alone", cost=CostModel(seconds, {"cpu": {"online_softmax": SHIPPED}}))
    large, small = (sorted(samples, key=lambda s: s.seconds)[i] for i in (-1, 0))
    # One call alone does not determine two constants.
    others = [Sample("other", large.call, halved(large.call, {**TRUE, "own": 1.0}))]
    fits = calibrate.fit_samples([small, *others, Sample("alone", large.call, 1.0)], CPU)
    by_backend = {f.backend: f for f in fits}
    assert list(by_backend) == ["mine", "other", "alone"]
    assert by_backend["mine"].constants == pytest.approx(TRUE, rel=0.02)
    assert by_backend["other"].constants == {**by_backend["mine"].constants, "own": 1.0}
    assert (by_backend["mine"].samples, by_backend["other"].samples, by_backend["other"].worst_call) == (
        1,
        1,
        large.call,
    )
    assert by_backend["alone"].constants != by_backend["mine"].constants


def test_the_worst_shape_is_named(made_up):
    made_up()
    samples = measured()
    odd = samples[3]
    samples[3] = dataclasses.replace(odd, seconds=odd.seconds * 3)
    (fit,) = calibrate.fit_samples(samples, CPU)
    assert fit.worst_call == odd.call
    assert fit.worst > 1.5


def test_what_the_formula_does_not_predict_is_left_out_of_the_fit(made_up):
    made_up(
        cost=CostModel(
            lambda call, c: seconds(call, c) if call.dims["rows"] > 1 else None, {"cpu": {"online_softmax": SHIPPED}}
        )
    )
    (fit,) = calibrate.fit_samples(measured(), CPU)
    assert fit.samples == 4
    made_up("never", cost=CostModel(lambda call, c: None, {"cpu": {"online_softmax": SHIPPED}}))
    assert calibrate.fit_samples([Sample("never", s.call, 1.0) for s in measured()], CPU) == []


def test_an_op_of_which_nothing_was_measured_has_no_fit(made_up):
    made_up()
    assert calibrate.fit_samples([Sample("mine", s.call, error="no") for s in measured()], CPU) == []


def test_samples_survive_json(made_up):
    made_up(fails_at=64)
    cuda = OpCall(
        op="chunk_gla_fwd",
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        dims={"B": 1},
        gate_dtype=torch.float32,
        variable_length=True,
        capturing=True,
    )
    samples = [*measured(), Sample("mine", cuda, 1.5)]
    assert calibrate.samples_from_json(json.loads(json.dumps(calibrate.samples_to_json(samples)))) == samples


def test_constants_are_written_as_backends_ship_them(made_up, tmp_path):
    made_up(
        cost=CostModel(
            seconds, {"cpu": {"online_softmax": SHIPPED, **OTHERS["cpu"]}, "NVIDIA H200": OTHERS["NVIDIA H200"]}
        )
    )
    fits = calibrate.fit_samples(measured(), CPU)
    assert calibrate.write_constants(fits, CPU, tmp_path / "constants.json") == [tmp_path / "constants.json"]
    assert calibrate.write_constants(fits, CPU, tmp_path / "folder") == [tmp_path / "folder" / "mine.json"]
    content = json.loads((tmp_path / "constants.json").read_text())
    assert content == json.loads((tmp_path / "folder" / "mine.json").read_text())
    assert content["NVIDIA H200"] == OTHERS["NVIDIA H200"]
    assert content["cpu"]["softmax_attention"] == {"x": 1.0}
    assert content["cpu"]["online_softmax"] == pytest.approx(TRUE, rel=0.01)
    with gla.register(Backend("shipped", "1", {}, cost=CostModel(seconds, content))):
        pass  # the written file can be shipped


def test_what_is_stored_serves_the_next_call(made_up):
    made_up()
    fits = calibrate.fit_samples(measured(), CPU)
    calibration.store({"mine": {fit.op: fit.constants for fit in fits}}, CPU)
    call = calibrate.plan(CPU, ["mine"])[0].call
    (mine,) = [c for c in gla.explain("online_softmax", torch.zeros(1, 128)).candidates if c.name == "mine"]
    assert mine.seconds == pytest.approx(seconds(call, TRUE), rel=0.02)
    assert mine.constants == "calibrated on this machine"
