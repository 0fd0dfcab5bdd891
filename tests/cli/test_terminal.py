"""Tables fit their terminal, and no name in them is cut."""

import io
import re

import pytest
import torch
from rich.console import Console

import gla_core as gla
from gla_core.dispatch.backend import Backend
from gla_core.terminal import GOOD, new_console, print_explanation, print_table, print_text, progress

ROWS = [
    {
        "name": "a_name_of_some_length",
        "time": "1.2 ms",
        "ops": ["first", "second", "third", "last"],
        "rate": "7",
        "empty": None,
    },
    {"name": "b", "time": "11.3 ms", "ops": [], "rate": "12", "empty": None},
]


@pytest.fixture
def table(monkeypatch, capsys):
    def table(columns, rows=ROWS, **how):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(new_console(), rows, **how)
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return table


def test_values_stand_side_by_side_where_there_is_room(table):
    _, header, _, *body, _ = table(70)
    assert header == ["name", "time", "ops", "rate"]  # without the empty column
    first = ["a_name_of_some_length", "1.2", "ms", "first,", "second,", "third,", "last", "7"]
    assert body == [first, ["b", "11.3", "ms", "12"]]


def test_they_go_on_in_the_next_line_where_there_is_not(table):
    _, _, _, *body, _ = table(55)
    first = ["a_name_of_some_length", "1.2", "ms", "first,", "second,", "7"]
    assert body == [first, ["third,", "last"], ["b", "11.3", "ms", "12"]]


@pytest.mark.parametrize("columns", range(56, 85, 4))
def test_a_table_fits_and_its_lists_take_the_room_there_is(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [*ROWS, {**ROWS[0], "more": None}]
    print_table(new_console(), [{**row, "more": ["alpha", "beta", "gamma", "delta", "epsilon"]} for row in rows])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert {"second,", "gamma,", "epsilon"} <= {word for line in lines for word in line.split()}


def test_short_lists_stay_on_one_line(table):
    assert table(25, [{"name": "a" * 20, "devices": ["cpu", "cuda"]}])[3] == ["a" * 20, "cpu,", "cuda"]


def test_spare_columns_go_first(table):
    assert table(44, spare=("rate", "time"))[1] == ["name", "time", "ops"]
    assert table(34, spare=("rate", "time"))[1] == ["name", "ops"]


def test_what_is_too_wide_all_the_same_stays_whole(table):
    assert table(10, spare=("rate",))[3] == ["a_name_of_some_length", "1.2", "ms", "first,"]


def test_prose_goes_on_in_the_next_line(table):
    words = ["a", "sentence", "that", "is", "longer", "than", "the", "terminal", "is", "wide"]
    lines = table(40, [{"name": "a", "effect": " ".join(words)}], prose=("effect",))
    assert lines[3][0] == "a"
    assert [word for line in lines[3:] for word in line][1:] == words


def test_without_a_terminal_lines_are_as_long_as_they_need_be(table):
    assert ["x" * 500] in table("", [{"name": "x" * 500}])


SENTENCE = "a refusal that is longer than the terminal is wide: needs a CUDA device; q is on cpu"


@pytest.fixture
def terminal(monkeypatch):
    """A function: `terminal(columns)` returns the console of a terminal of this width with colours."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def terminal(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        return new_console()

    return terminal


def plain(text):
    return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_wraps_sentences_between_words(terminal, capsys):
    print_text(terminal(40), f"  {SENTENCE}", hang=3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, 5, 5]


def test_what_is_piped_is_not_wrapped(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")  # as some shells export it
    print_text(new_console(), SENTENCE)
    assert capsys.readouterr().out == f"{SENTENCE}\n"


def test_colours_of_a_terminal(terminal, capsys):
    print_text(terminal(80), "all is well", GOOD)
    assert capsys.readouterr().out == "\x1b[32mall is well\x1b[0m\n"


@pytest.mark.parametrize("name", ["FORCE_COLOR", "NO_COLOR"])
def test_no_colours_where_output_is_piped_or_none_are_wanted(terminal, monkeypatch, capsys, name):
    monkeypatch.delenv(name) if name == "FORCE_COLOR" else monkeypatch.setenv(name, "1")
    print_text(terminal(80), "all is well", GOOD)
    assert capsys.readouterr().out == "all is well\n"


def test_the_winner_of_an_explanation_is_coloured(terminal, capsys):
    tensors = [torch.empty(1, 8, 1, 4)] * 4
    print_explanation(terminal(60), gla.explain("chunk_gla_fwd", *tensors, backend="reference"))
    written = capsys.readouterr().out
    coloured = [line for line in written.splitlines() if line.startswith("\x1b[32m")]
    assert coloured[0].startswith("\x1b[32m -> reference")
    assert max(len(line) for line in plain(written).splitlines()) <= 60


def test_a_call_that_no_backend_can_run_is_red(terminal, capsys):
    x = torch.empty(3, 4, dtype=torch.float64)
    with gla.register(Backend("narrow", "1", {"online_softmax": lambda x, dim: x})):
        print_explanation(terminal(200), gla.explain("online_softmax", x, backend="narrow"))
    red = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\x1b[31m")]
    assert [plain(line)[:38] for line in red] == ["no backend can run online_softmax (req"]


@pytest.mark.parametrize("columns", [40, 120])
def test_a_progress_bar_names_what_is_worked_on(columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    console = Console(file=Terminal(), force_terminal=True, width=columns)
    workloads = ["chunk_gla short-reference-forward", "chunk_gla grouped-reference-forward+backward"]
    shown = []
    for _ in progress(console, workloads, str):
        shown.append(plain(console.file.getvalue().split("\r")[-1]))
    assert ["chunk_gla sho" in shown[0], "chunk_gla gro" in shown[1]] == [True, True]
    assert ["0/2" in shown[0], "1/2" in shown[1]] == [True, True]
    assert max(map(len, shown)) <= columns


def test_there_is_no_progress_bar_where_output_is_piped(terminal, capsys):
    assert list(progress(terminal(80), [1, 2], str)) == [1, 2]
    assert capsys.readouterr().out == ""
