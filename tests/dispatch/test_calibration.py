"""Predicted times: the constants that a cost model receives, and the file of constants that were measured here."""

import itertools
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.dispatch import calibration
from gla_core.dispatch.backend import Backend, CostModel, OpCall
from gla_core.files import write_json

pytestmark = pytest.mark.usefixtures("only_reference")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FACTS = {"multiprocessors": 1.0, "compute_capability": 0.0}


def softmax(x, dim):
    return torch.softmax(x, dim)


def launch_and_rate(call, c):
    return c["launch"] + call.dims["rows"] * call.dims["columns"] / c["rate"]


SHIPPED = {"launch": 1e-3, "rate": 1e6}


def model(formula=launch_and_rate, **constants):
    """Returns a cost model of online_softmax with these constants for each kind of device."""
    by_kind = {kind.replace("_", " "): {"online_softmax": value} for kind, value in constants.items()}
    return CostModel(formula, by_kind or {"cpu": {"online_softmax": SHIPPED}})


def backend(cost=None, name="mine", version="1.0"):
    return Backend(name, version, {"online_softmax": softmax}, cost=model() if cost is None else cost)


def softmax_call(rows=2, columns=3, device=CPU):
    dims = {"rows": rows, "columns": columns}
    return OpCall(op="online_softmax", device=device, dtype=torch.float32, dims=dims)


CALL = softmax_call()


@pytest.fixture
def mine():
    with gla.register(backend()) as registered:
        yield registered


@pytest.fixture
def another_gpu(monkeypatch):
    """Makes cuda:0 a kind of device without shipped constants."""
    real, facts = calibration._device, {"multiprocessors": 108.0, "compute_capability": 8.0}
    a100 = ("NVIDIA A100", facts)
    monkeypatch.setattr(calibration, "_device", lambda device: a100 if device == CUDA else real(device))
    return facts


def store(constants, name="mine", op="online_softmax"):
    return calibration.store({name: {op: constants}}, CPU)


# which constants


def test_shipped_constants(mine):
    assert calibration.predict(mine, CALL) == calibration.Prediction(1e-3 + 6e-6, "shipped for cpu")


def test_the_formula_receives_the_constants_and_what_is_known_of_the_device(mine):
    assert calibration.constants_for(mine, CALL) == ({**SHIPPED, **FACTS}, "shipped for cpu")


def test_a_formula_may_do_without_constants():
    model_of_facts = backend(CostModel(lambda call, c: c["multiprocessors"]))
    assert calibration.predict(model_of_facts, CALL) == calibration.Prediction(1.0, None)


def test_a_plain_function_predicts_without_constants():
    assert calibration.predict(backend(lambda call: 2.0), CALL) == calibration.Prediction(2.0, None)


def test_no_cost_is_no_prediction(mine):
    assert calibration.predict(Backend("none", "1", {}), CALL) == calibration.Prediction(None)


@pytest.mark.parametrize(
    "cost",
    [
        model(lambda call, c: 1 / 0),
        model(lambda call, c: float("nan")),
        model(lambda call, c: float("inf")),
        model(lambda call, c: -1.0),
        model(lambda call, c: None),
        model(lambda call, c: "soon"),
        model(lambda call, c: c["of another op"]),
        model(NVIDIA_H200=SHIPPED),
        CostModel(launch_and_rate),
    ],
    ids=["raises", "nan", "inf", "negative", "none", "text", "missing", "another device", "no constants"],
)
def test_an_unusable_model_is_no_prediction_and_ranks_last(cost, spy, x):
    assert calibration.predict(backend(cost), CALL) == calibration.Prediction(None)
    spy("a_unusable", cost=cost)
    spy("slow", cost=lambda call: 1e6)
    assert [c.name for c in gla.explain("online_softmax", x).candidates][:2] == ["slow", "a_unusable"]


def test_a_gpu_that_nobody_has_measured_borrows_from_another(another_gpu):
    call, constants = softmax_call(device=CUDA), {"launch": 1e-5, "rate": 1e9}
    borrowed = backend(model(cpu=SHIPPED, NVIDIA_H200=constants))
    assert calibration.constants_for(borrowed, call) == ({**constants, **another_gpu}, "shipped for NVIDIA H200")
    measured = backend(model(NVIDIA_A100=SHIPPED, NVIDIA_H200=constants))
    assert calibration.constants_for(measured, call) == ({**SHIPPED, **another_gpu}, "shipped for NVIDIA A100")
    assert calibration.predict(backend(model(cpu=SHIPPED)), call).seconds is None


def test_calibration_starts_from_whatever_is_shipped(another_gpu):
    assert calibration.start_constants(backend(model(cpu=SHIPPED)), "online_softmax", CUDA) == SHIPPED
    assert calibration.start_constants(backend(model(cpu=SHIPPED)), "chunk_gla_fwd", CUDA) is None
    assert calibration.start_constants(backend(CostModel(launch_and_rate)), "online_softmax", CPU) is None


def test_auto_ranks_by_the_models_for_every_shape(spy):
    spy("many_rows", ops=["online_softmax"], cost=model(lambda call, c: c["row"], cpu={"row": 10.0}))
    spy("few_rows", ops=["online_softmax"], cost=model(lambda call, c: c["row"] * call.dims["rows"], cpu={"row": 1.0}))
    winners = [gla.explain("online_softmax", torch.zeros(rows, 2)).winner for rows in (1, 9, 10, 11)]
    assert winners == ["few_rows", "few_rows", "few_rows", "many_rows"]


def test_the_explanation_says_where_the_constants_come_from(mine):
    assert "mine             can run; predicts 1.01 ms (constants shipped for cpu)" in str(explained())
    store({"launch": 2e-5, "rate": 1e6})
    assert "predicts 26.0 us (constants calibrated on this machine)" in str(explained())


def explained():
    return gla.explain("online_softmax", torch.zeros(2, 3))


# measured constants


def test_measured_constants_come_before_shipped_ones(mine):
    store({"launch": 1.0, "rate": 6.0})
    assert calibration.predict(mine, CALL) == calibration.Prediction(2.0, "calibrated on this machine")


def test_the_running_process_sees_them_at_once(spy, x):
    a = spy("a", ops=["online_softmax"], cost=model())
    b = spy("b", ops=["online_softmax"], cost=lambda call: 0.5)
    gla.online_softmax(x)
    store({"launch": 1.0, "rate": 1e6}, "a")
    gla.online_softmax(x)
    assert (len(a.calls), len(b.calls)) == (1, 1)


def test_a_later_process_sees_them(mine):
    store({"launch": 1.0, "rate": 6.0})
    gla.reload_environment()
    assert calibration.predict(mine, CALL).seconds == 2.0


@pytest.mark.parametrize(
    "stale",
    [
        {"launch": 1.0},
        {"launch": 1.0, "rate": 1.0, "more": 1.0},
        {"launch": 1.0, "speed": 1.0},
        {"launch": 1.0, "rate": -1.0},
        {"launch": 1.0, "rate": 0},
        {"launch": 1.0, "rate": float("nan")},
        {"launch": 1.0, "rate": float("inf")},
        {"launch": 1.0, "rate": "1"},
        {"launch": 1.0, "rate": True},
        {"launch": 1.0, "rate": None},
    ],
)
def test_constants_that_do_not_fit_the_model_are_a_miss(mine, stale):
    store(stale)
    assert calibration.predict(mine, CALL).source == "shipped for cpu"


def test_another_version_of_the_backend_is_a_miss(mine):
    store({"launch": 1.0, "rate": 1.0})
    assert calibration.predict(backend(), CALL).source == "calibrated on this machine"
    assert calibration.predict(backend(version="1.1"), CALL).source == "shipped for cpu"
    assert calibration.predict(backend(name="other"), CALL).source == "shipped for cpu"


@pytest.mark.parametrize("changed", ["torch", "triton", "gla-core"])
def test_another_version_of_what_it_runs_on_is_a_miss(mine, monkeypatch, changed):
    store({"launch": 1.0, "rate": 1.0})
    real = calibration.version_of
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    monkeypatch.setattr(calibration, "version_of", lambda name: "0.0" if name == changed else real(name))
    calibration._conditions.cache_clear()
    assert calibration.predict(mine, CALL).source == "shipped for cpu"
    monkeypatch.undo()
    calibration._conditions.cache_clear()


def test_another_device_is_a_miss(another_gpu):
    both = backend(model(cpu=SHIPPED, NVIDIA_H200=SHIPPED))
    with gla.register(both):
        store({"launch": 1.0, "rate": 1.0})
        assert calibration.predict(both, softmax_call(device=CUDA)).source == "shipped for NVIDIA H200"
        calibration.store({"mine": {"online_softmax": {"launch": 2.0, "rate": 6.0}}}, CUDA)
        assert calibration.predict(both, softmax_call(device=CUDA)).seconds == 3.0
        assert calibration.predict(both, CALL).seconds == 7.0


def test_it_is_read_once(mine, monkeypatch):
    read, real = [], calibration._read
    monkeypatch.setattr(calibration, "_read", lambda file: read.append(file) or real(file))
    gla.reload_environment()
    for columns in range(1, 20):
        gla.online_softmax(torch.zeros(2, columns))
    assert read == [calibration.path()]


# the file


UNREADABLE = ["", "{", "[]", "null", "1", '"text"', "[" * 100_000, '{"cpu": 1}', "\udcff"]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_unreadable_file_is_a_miss_and_is_replaced(mine, text):
    calibration.path().parent.mkdir()
    calibration.path().write_bytes(text.encode(errors="surrogateescape"))
    assert calibration.predict(mine, CALL).source == "shipped for cpu"
    store({"launch": 1.0, "rate": 6.0})
    assert calibration.predict(mine, CALL).seconds == 2.0


def test_a_folder_in_its_place_is_a_miss(mine):
    calibration.path().mkdir(parents=True)
    assert calibration.predict(mine, CALL).source == "shipped for cpu"
    with pytest.raises(OSError, match=r"calibration\.json"):
        store(SHIPPED)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_its_place_is_a_miss_and_is_not_waited_for(mine, in_time):
    calibration.path().parent.mkdir()
    os.mkfifo(calibration.path())
    assert in_time(lambda: calibration.predict(mine, CALL).source) == "shipped for cpu"


def test_no_home_is_a_miss(mine, set_environment):
    set_environment(GLA_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME="/dev/null")
    assert calibration.predict(mine, CALL).source == "shipped for cpu"
    with pytest.raises(OSError, match="/dev/null"):
        store(SHIPPED)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(value=json_values, depth=st.integers(0, 4))
def test_no_content_is_an_error(mine, value, depth):
    """The file may hold any value at any depth. The rest of the file is correct."""
    for key in ("rate", "online_softmax", "mine 1.0", calibration._conditions("cpu"))[4 - depth :]:
        value = {key: value}
    write_json(calibration.path(), value)
    calibration._forget()
    assert calibration.predict(mine, CALL).seconds is not None
    store({"launch": 1.0, "rate": 6.0})
    assert calibration.predict(mine, CALL).seconds == 2.0


@settings(max_examples=30)
@given(
    launch=st.floats(0, exclude_min=True, allow_infinity=False), rate=st.floats(0, exclude_min=True, max_value=1e300)
)
def test_what_is_stored_is_what_is_read(mine, launch, rate):
    store({"launch": launch, "rate": rate})
    assert calibration.constants_for(mine, CALL)[0] == {"launch": launch, "rate": rate, **FACTS}


def test_what_else_the_file_holds_stays(mine, another_gpu):
    store({"launch": 1.0, "rate": 1.0})
    with gla.register(backend(name="other")):
        store({"launch": 2.0, "rate": 2.0}, "other")
    store({"step": 3.0}, op="chunk_gla_fwd")
    calibration.store({"mine": {"online_softmax": {"launch": 4.0, "rate": 4.0}}}, CUDA)
    content = json.loads(calibration.path().read_text())
    assert content == {
        calibration._conditions("cpu"): {
            "mine 1.0": {"online_softmax": {"launch": 1.0, "rate": 1.0}, "chunk_gla_fwd": {"step": 3.0}},
            "other 1.0": {"online_softmax": {"launch": 2.0, "rate": 2.0}},
        },
        calibration._conditions("NVIDIA A100"): {"mine 1.0": {"online_softmax": {"launch": 4.0, "rate": 4.0}}},
    }
    assert f"torch {torch.__version__}" in calibration._conditions("cpu")


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(mine, monkeypatch):
    path = store({"launch": 1.0, "rate": 6.0})
    before = path.read_text()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="no space left"):
        store({"launch": 2.0, "rate": 2.0})
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]
    assert calibration.predict(mine, CALL).seconds == 2.0


def test_threads_that_store_and_predict_at_once(at_once):
    names = [f"backend_{i}" for i in range(4)]
    handles = [gla.register(backend(name=name)) for name in names]
    wrong = []

    def work(handle):
        try:
            for seconds in itertools.chain(range(1, 20), [100]):
                store({"launch": float(seconds), "rate": 6.0}, handle.backend.name)
                gla.online_softmax(torch.zeros(2, seconds))
                assert calibration.predict(handle.backend, CALL).seconds == seconds + 1
        except BaseException as error:
            wrong.append(error)

    at_once(work, handles)
    assert wrong == []
    gla.reload_environment()
    assert [calibration.predict(handle.backend, CALL).seconds for handle in handles] == [101] * 4
    for handle in handles:
        handle.unregister()
