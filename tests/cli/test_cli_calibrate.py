"""gla calibrate, and gla explain --measure."""

import gc
import json

import pytest
import torch

import gla_core as gla
from gla_core.bench import measure
from gla_core.dispatch import calibration
from gla_core.dispatch.backend import Backend, CostModel

TRUE = {"launch": 1e-4, "rate": 2e7}
SHIPPED = {"cpu": {"online_softmax": {"launch": 3e-5, "rate": 1e8}}}
SHAPE = ("online_softmax", "--shape", "2,3", "--dtype", "float32", "--device", "cpu")


def predicted(call, c):
    return c["launch"] + call.dims["rows"] * call.dims["columns"] / c["rate"]


@pytest.fixture(autouse=True)
def none_of_ours(isolated, monkeypatch, own_backends, set_environment):
    """Leaves only made-up backends. Their calls take a stated time on a fake clock."""
    set_environment(GLA_BLOCK_PLUGINS=",".join(own_backends))
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it runs after each failure, and would take most of the time


@pytest.fixture
def made_up(monkeypatch):
    now, handles = [0.0], []
    monkeypatch.setattr(measure, "clock", lambda: now[0])

    def register(name="mine", true=TRUE, error=None, fails_at=0, cost=None):
        def online_softmax(x, dim):
            if error is not None and x.shape[1] >= fails_at:
                raise error
            now[0] += true["launch"] + x.numel() / true["rate"]
            return torch.empty_like(x)

        handles.append(
            gla.register(
                Backend(name, "1.0", {"online_softmax": online_softmax}, cost=cost or CostModel(predicted, SHIPPED))
            )
        )

    yield register
    for handle in handles:
        handle.unregister()


def calibrate(run, *arguments):
    return run("calibrate", "--device", "cpu", "--seconds", "0.01", *arguments)


def constants():
    (constants,) = json.loads(calibration.path().read_text()).values()
    return constants


def test_it_measures_fits_prints_and_stores(run, made_up):
    made_up()
    result = calibrate(run)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("cpu: 7 measurements of mine\n")
    (row,) = [line.split() for line in result.output.splitlines() if "online_softmax" in line]
    assert row[:3] == ["online_softmax", "mine", "7"]
    assert float(row[3]) > 2
    assert [float(cell) for cell in row[4:6]] == pytest.approx([1, 1], abs=0.02)
    assert row[-2] == "launch"
    assert float(row[-1]) == pytest.approx(1e-4, rel=0.01)
    assert result.output.endswith(f"stored in {calibration.path()}\n")
    assert constants()["mine 1.0"]["online_softmax"] == pytest.approx(TRUE, rel=0.01)


def test_the_running_process_and_explain_and_doctor_see_it(run, made_up):
    made_up()
    before = run("explain", *SHAPE).output
    calibrate(run)
    after = run("explain", *SHAPE).output
    assert "predicts 30.1 us (constants shipped for cpu)" in before
    assert "us (constants calibrated on this machine)" in after
    report = json.loads(run("doctor", "--json").stdout)
    assert report["calibration"] == [{"device": "cpu", "backend": "mine", "calibrated": ["online_softmax"]}]
    assert str(calibration.path().parent) in run("doctor").output


def test_auto_then_takes_what_is_fastest_here(run, made_up):
    made_up("a", true={"launch": 1e-3, "rate": 1e9})
    made_up("b", true={"launch": 1e-5, "rate": 1e7})
    small, large = torch.zeros(2, 3), torch.zeros(1000, 1000)
    calibrate(run)
    assert [gla.explain("online_softmax", x).winner for x in (small, large)] == ["b", "a"]


def test_a_dry_run_stores_nothing(run, made_up, monkeypatch):
    made_up()
    monkeypatch.setattr("os.getloadavg", lambda: (1e9, 0.0, 0.0), raising=False)
    result = calibrate(run, "--dry-run")
    assert "this machine was busy in the last minute: load average 1000000000.0" in result.output
    assert result.exit_code == 0
    assert "launch" in result.output
    assert not calibration.path().exists()


def test_one_backend_and_one_op(run, made_up):
    made_up("a")
    made_up("b")
    assert calibrate(run, "--backend", "b", "--op", "online_softmax").exit_code == 0
    assert set(constants()) == {"b 1.0"}


def test_constants_to_ship(run, made_up, tmp_path):
    made_up("a")
    made_up("b")
    file, folder = tmp_path / "constants.json", tmp_path / "all"
    assert f"wrote {file}" in calibrate(run, "--backend", "a", "--json", file).output
    calibrate(run, "--json", folder)
    assert {path.name for path in folder.iterdir()} == {"a.json", "b.json"}
    for written in (file, folder / "a.json"):
        assert json.loads(written.read_text())["cpu"]["online_softmax"] == pytest.approx(TRUE, rel=0.01)


def test_a_shape_that_fails_is_left_out_and_named(run, made_up):
    made_up(error=RuntimeError("out of paper\nand ink"), fails_at=2**18)
    result = calibrate(run)
    assert result.exit_code == 0
    assert "left out: online_softmax by mine at rows=1 columns=262144: RuntimeError: out of paper\n" in result.output
    assert constants()["mine 1.0"]["online_softmax"] == pytest.approx(TRUE, rel=0.01)


def test_a_backend_that_always_fails_is_bad_news_and_the_others_go_on(run, made_up):
    made_up("a", error=RuntimeError("out of paper"))
    made_up("b")
    result = calibrate(run)
    assert result.exit_code == 1
    assert "left out: online_softmax by a at 7 shapes: RuntimeError: out of paper\n" in result.output
    assert set(constants()) == {"b 1.0"}


def test_nothing_measured_stores_nothing(run, made_up):
    made_up(error=RuntimeError("out of paper"))
    assert calibrate(run).exit_code == 1
    assert not calibration.path().exists()


def test_an_interrupt_stores_nothing(run, made_up):
    made_up("a")
    made_up("b", error=KeyboardInterrupt(), fails_at=4096)
    result = calibrate(run)
    assert result.exit_code == 130
    assert "interrupted; nothing was stored" in result.output
    assert not calibration.path().exists()


@pytest.mark.parametrize("place", ["cache", "--json"])
def test_a_place_that_cannot_be_written_is_found_before_anything_is_measured(run, made_up, set_environment, place):
    made_up(error=AssertionError("it was measured"))
    if place == "cache":
        set_environment(GLA_CACHE_DIR="/dev/null/here")
    result = calibrate(run, *(["--json", "/dev/null/here"] if place == "--json" else []))
    assert result.exit_code == 2
    assert result.stderr.startswith("gla calibrate: ")
    assert "/dev/null/here" in result.stderr
    assert "cannot be written: Not a directory" in result.stderr
    assert result.stdout == ""


def test_chunk_gla_stands_for_both_of_its_ops(run, made_up):
    made_up()
    result = calibrate(run, "--op", "chunk_gla", "--op", "online_softmax")
    assert result.exit_code == 0
    assert set(constants()["mine 1.0"]) == {"online_softmax"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "mime"], "unknown backend 'mime'; did you mean 'mine'?"),
        (["--backend", "plain"], "backend 'plain' has no cost model whose constants could be measured"),
        (["--op", "softmax"], "unknown op 'softmax'; did you mean"),
        (["--op", "chunk_gla_fwd"], "there is nothing to measure on cpu"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--seconds", "0"], "--seconds"),
        (["--json", "constants.json"], "constants.json is one file for mine, other; name a folder, or one --backend"),
    ],
)  # fmt: skip
def test_bad_usage(run, made_up, arguments, message):
    made_up()
    made_up("other")
    made_up("plain", cost=lambda call: 1.0)
    result = calibrate(run, *arguments)
    assert result.exit_code == 2
    assert message in result.output


# explain --measure


def test_explain_measures(run, made_up):
    made_up("a", true={"launch": 2e-3, "rate": 1e9}, cost=lambda call: 1e-6)
    made_up("b", true={"launch": 1e-3, "rate": 1e9}, cost=lambda call: 1e-5)
    result = run("explain", *SHAPE, "--measure")
    assert result.exit_code == 0
    assert result.output.splitlines()[2:] == [
        " -> a                can run; predicts 1.0 us; measured 2.00 ms",
        "    b                can run; predicts 10.0 us; measured 1.00 ms  <- the fastest",
        "a: the least predicted time",
        "measured: b is faster, a takes 2.00 times as long",
    ]


def test_explain_measures_into_json(run, made_up):
    made_up("a", true={"launch": 2e-3, "rate": 1e9})
    made_up("b", error=RuntimeError("out of paper"))
    report = json.loads(run("explain", *SHAPE, "--measure", "--json").stdout)
    assert (report["winner"], report["fastest"]) == ("a", "a")
    a, b = report["candidates"]
    assert a["seconds"] == pytest.approx(3e-5, rel=0.01)
    assert a["measured"] == pytest.approx(2e-3, rel=0.01)
    assert a["constants"] == "shipped for cpu"
    assert (b["measured"], b["failure"]) == (None, "RuntimeError: out of paper")


def test_explain_without_measure_runs_nothing(run, made_up):
    made_up(error=RuntimeError("out of paper"))
    assert "paper" not in run("explain", *SHAPE).output


def test_explain_cannot_measure_where_there_is_no_device(run, made_up, monkeypatch):
    made_up()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("explain", "online_softmax", "--shape", "2,3", "--device", "cuda", "--measure")
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device here" in result.output
