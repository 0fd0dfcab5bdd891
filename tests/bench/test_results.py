"""Results files, tables and plots, from results that nobody measured."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import gla_core as gla
from gla_core.bench import plots, results
from gla_core.bench.suite import Row


def test_what_is_written_is_read(tmp_path, synthetic):
    path = tmp_path / "new" / "results.json"
    results.write(path, synthetic)
    assert results.read(path) == synthetic
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"speed": 1}]}'])
def test_a_file_that_holds_something_else(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json holds no results of gla bench"):
        results.read(path)


def test_the_run_is_described():
    found = results.describe_run(torch.device("cpu"), 5e9, commit="abc")
    assert (found.torch, found.gla_core, found.commit) == (torch.__version__, gla.__version__, "abc")
    assert (found.driver, found.copy_bandwidth, found.rows) == (None, 5e9, ())
    assert found.date.endswith("+00:00")
    assert found.device


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (80.12, "80.1 s"),
        (240.4, "240 s"),
        (1.0, "1.00 s"),
        (0.25, "250 ms"),
        (1.3671e-3, "1.37 ms"),
        (10.7e-6, "10.7 us"),
        (5e-7, "0.50 us"),
    ],
)
def test_times_have_three_digits(seconds, text):
    assert results.time_text(seconds) == text


def test_the_table(synthetic):
    header, body = results.table(synthetic.rows)
    assert header == ["workload", "direction", "backend", "time", "GB/s", "of floor", "× fla", "error"]
    assert body == [
        ["short", "forward", "fla", "2.00 ms", "400", "10.0%", "", ""],
        ["short", "forward", "mine", "500 us", "1600", "40.0%", "4.00", ""],
        ["grouped", "forward", "mine", "-", "", "", "", "ValueError: a | b"],
        ["small", "step", "mine", "15.0 us", "", "", "", ""],
    ]


def test_columns_that_say_nothing_are_left_out(synthetic):
    header, body = results.table(synthetic.rows[3:])
    assert header == ["workload", "direction", "backend", "time", "GB/s", "of floor"]
    assert [len(line) for line in body] == [6]


def test_a_failure_is_a_line_with_what_it_concerns():
    def row(op, workload, backend, direction, error):
        return Row(op=op, workload=workload, backend=backend, direction=direction, error=error)

    rows = [
        row("chunk_gla", "a", "mine", "forward", "mine: is asleep"),
        row("chunk_gla", "b", "mine", "forward", "mine: is asleep"),
        row("recurrent_gla_step", "a", "mine", "step", "mine: is asleep"),
        row("chunk_gla", "a", "auto", "forward+backward", "mine: is asleep; other: is away"),
        row("chunk_gla", "a", "mine", "host", None),
    ]
    assert results.failures(rows) == [
        "mine: is asleep (chunk_gla forward; recurrent_gla_step step; 3 workloads)",
        "auto: mine: is asleep; other: is away (chunk_gla forward+backward; a)",
    ]


def test_markdown(synthetic):
    assert results.markdown(synthetic.rows[:1] + synthetic.rows[2:3]).splitlines() == [
        "| workload | direction | backend | time | GB/s | of floor | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| short | forward | fla | 2.00 ms | 400 | 10.0% |  |",
        "| grouped | forward | mine | - |  |  | ValueError: a / b |",
    ]


def test_without_matplotlib_plots_say_what_to_install(synthetic, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"plots need matplotlib: pip install 'gla-core\[bench\]'"):
        plots.plot(synthetic, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


class Pyplot(types.ModuleType):
    """Takes down what is drawn."""

    def __init__(self):
        super().__init__("matplotlib.pyplot")
        self.lines, self.bars = [], []

    def subplots(self, figsize):
        return self, self

    def plot(self, x, y, marker, label):
        self.lines.append((label, list(x), list(y)))

    def barh(self, places, values):
        self.bars.append(list(values))

    def savefig(self, path, **_):
        path.write_text("a picture")

    def close(self, figure):
        assert figure is self

    def __getattr__(self, name):
        if name.startswith(("set_", "legend", "axvline")):
            return lambda *_, **__: None
        raise AttributeError(name)


def test_plots(synthetic, tmp_path, monkeypatch):
    pyplot = Pyplot()
    matplotlib = types.ModuleType("matplotlib")
    matplotlib.use = lambda backend: None
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    written = plots.plot(synthetic, tmp_path / "plots")
    assert [p.name for p in written] == ["chunk_gla-time.png", "chunk_gla-floor.png", "chunk_gla-ratio-to-fla.png"]
    assert all(p.read_text() == "a picture" for p in written)
    tokens = 2 * 17 * 2  # B T H of the workload short
    assert pyplot.lines == [
        ("fla forward", [17], [pytest.approx(2e-3 / tokens * 1e9)]),
        ("mine forward", [17], [pytest.approx(5e-4 / tokens * 1e9)]),
    ]
    assert pyplot.bars == [[0.4, 0.1], [4.0]]
