"""Results files, tables and plots, from made-up results."""

import dataclasses
import re
import sys

import pytest
import torch

import gla_core as gla
from gla_core.bench import plots, results
from gla_core.bench.suite import Row
from gla_core.workloads.named import WORKLOADS


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
    actual = results.describe_run(torch.device("cpu"), 5e9, commit="abc")
    assert (actual.torch, actual.gla_core, actual.commit) == (torch.__version__, gla.__version__, "abc")
    assert (actual.driver, actual.copy_bandwidth, actual.rows) == (None, 5e9, ())
    assert actual.date.endswith("+00:00")
    assert actual.device


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
    with pytest.raises(ValueError, match=r"plots need matplotlib: pip install '\.\[bench\]' in a clone"):
        plots.plot(synthetic, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_a_picture_for_each_op_that_was_timed(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.plot(synthetic, tmp_path / "plots")
    assert [p.name for p in written] == ["chunk_gla.svg", "recurrent_gla_step.svg"]
    pictures = [p.read_text() for p in written]
    widths = [float(re.findall(r'<svg [^>]*?width="([\d.]+)pt"', picture)[0]) for picture in pictures]
    assert max(widths) < 400  # letters of 9 points on a phone, whatever the number of directions
    assert "chunk_gla: speed relative to flash-linear-attention, higher is better" in pictures[0]
    assert "NVIDIA Pretend, float32; torch 2.11.0, triton 3.6.0" in pictures[0]
    assert "500 us, 4.0 ×" in pictures[0]
    plots.plot(synthetic, tmp_path / "again")
    assert [(tmp_path / "again" / p.name).read_text() for p in written] == pictures


def op_rows(seconds, workload="short"):
    """Returns the rows of one workload, one per backend."""
    return [
        Row(workload=workload, op="chunk_gla", backend=name, direction="forward", seconds=s)
        for name, s in seconds.items()
    ]


def test_bars_stand_in_one_order():
    assert plots.in_order(["zeta", "parallel_scan", "reference", "fla", "triton_fused", "fla", "alpha"]) == [
        *("fla", "triton_fused", "parallel_scan", "reference", "alpha", "zeta")
    ]


def test_backends_with_equal_times_share_a_bar():
    one = op_rows({"fla": 1.0, "triton_fused": 1.0, "parallel_scan": 1.01, "reference": 2.0})
    assert plots.equal_backends(one) == {"parallel_scan": "triton_fused"}
    assert plots.equal_backends([*one, *op_rows({"triton_fused": 1.0, "parallel_scan": 1.1}, "small")]) == {}
    assert plots.equal_backends([*one, *op_rows({"triton_fused": 1.0}, "small")]) == {}  # the other has no time there


@pytest.mark.parametrize(("slow", "logarithmic"), [(1.0, False), (20.0, True)])
def test_an_axis_is_logarithmic_where_a_bar_would_be_too_long(synthetic, tmp_path, slow, logarithmic):
    pytest.importorskip("matplotlib")
    rows = op_rows({"fla": slow, "triton_fused": 1.0})
    (path,) = plots.plot(synthetic.with_rows(rows), tmp_path)
    assert ("speed relative to flash-linear-attention, log scale" in path.read_text()) == logarithmic


def test_a_backend_without_a_time_says_so(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*op_rows({"fla": 2.0, "triton_fused": 1.0}), *op_rows({"fla": 2.0}, "one_chunk")]
    (path,) = plots.plot(synthetic.with_rows(rows), tmp_path)
    assert path.read_text().count("no time") == 1


@pytest.mark.parametrize(
    ("op", "workloads", "words"),
    [
        ("chunk_gla", ["train_b8_t4096_h16"], "bfloat16 with float32 gates, K = V = 128"),
        (
            "chunk_gla",
            ["train_b8_t4096_h16", "train_b32_t2048_h4_k256_v512"],
            "bfloat16 with float32 gates, K = V = 128 unless a label says otherwise",
        ),
        ("online_softmax", ["rows_8192_columns_1024"], "bfloat16"),
        ("chunk_gla", ["one_token", "train_b8_t4096_h16"], "K = V = 128 unless a label says otherwise"),
        ("chunk_gla", ["of somebody else"], ""),
    ],
)
def test_conditions_of_a_picture(op, workloads, words):
    assert plots.conditions(op, workloads) == words


def test_speed_is_beside_the_first_row(synthetic):
    fla, mine, *_ = synthetic.rows
    assert plots.speeds([fla, mine]) == [(fla, 1), (mine, 4)]
    assert plots.speeds([mine]) == [(mine, 1)]
    other_run = Row(**{**dataclasses.asdict(mine), "ratio_to": {"fla": 3.9}})
    assert plots.speeds([fla, other_run])[1] == (other_run, 3.9)  # the speed of the row's own run


@pytest.mark.parametrize(
    ("op", "workload", "words"),
    [
        ("chunk_gla", "train_b8_t4096_h16", "8 sequences of 4096 tokens, 16 heads"),
        ("chunk_gla", "train_b32_t2048_h4_k256_v512", "32 sequences of 2048 tokens, 4 heads (K 256, V 512)"),
        ("chunk_gla", "one_token", "1 sequence of 1 token, 1 head (K 16, V 16)"),
        ("chunk_gla", "packed_64_t65536_h8", "64 packed sequences, 65,536 tokens in all, 8 heads"),
        ("recurrent_gla_step", "decode_b64", "64 sequences, 16 heads"),
        ("online_softmax", "rows_8192_columns_50257", "8192 rows of 50,257"),
        ("online_softmax", "other_dimension", "3 × 50 × 7"),
        ("softmax_attention", "one_query_131072_keys", "1 query, 131,072 keys, 16 heads"),
        ("softmax_attention", "causal_b4_t4096_h16", "batch of 4, 4096 queries, 4096 keys, 16 heads, causal"),
        ("chunk_gla", "of somebody else", "of somebody else"),
    ],
)
def test_workloads_in_words(op, workload, words):
    assert plots.in_words(op, workload) == words


def test_every_named_workload_has_words():
    for workload in WORKLOADS:
        assert plots.in_words(workload.op, workload.name) != workload.name


def test_one_colour_a_backend():
    actual = plots.colours(["fla", "mine", "triton_fused", "mine", "yours"])
    assert list(actual) == ["fla", "mine", "triton_fused", "yours"]
    assert len(set(actual.values())) == 4
    assert actual["triton_fused"] == plots.colours(["triton_fused"])["triton_fused"]
