"""Tables fit their terminal, and no name in them is cut."""

from __future__ import annotations

import pytest

from gla_core.terminal import new_console, print_table

ROWS = [
    {"name": "a_name_of_some_length", "time": "1.2 ms", "ops": ["first", "second"], "rate": "7", "empty": None},
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
    _, header, _, *body, _ = table(60)
    assert header == ["name", "time", "ops", "rate"]  # not the column that nobody fills
    assert body == [["a_name_of_some_length", "1.2", "ms", "first,", "second", "7"], ["b", "11.3", "ms", "12"]]


def test_they_stand_below_each_other_where_there_is_not(table):
    _, _, _, *body, _ = table(47)
    assert body == [["a_name_of_some_length", "1.2", "ms", "first", "7"], ["second"], ["b", "11.3", "ms", "12"]]


def test_spare_columns_go_first(table):
    assert table(40, spare=("rate", "time"))[1] == ["name", "time", "ops"]
    assert table(34, spare=("rate", "time"))[1] == ["name", "ops"]


def test_what_is_too_wide_all_the_same_stays_whole(table):
    assert table(10, spare=("rate",))[3] == ["a_name_of_some_length", "1.2", "ms", "first"]


def test_prose_goes_on_in_the_next_line(table):
    words = ["a", "sentence", "that", "is", "longer", "than", "the", "terminal", "is", "wide"]
    lines = table(40, [{"name": "a", "effect": " ".join(words)}], prose=("effect",))
    assert lines[3][0] == "a"
    assert [word for line in lines[3:] for word in line][1:] == words


def test_without_a_terminal_lines_are_as_long_as_they_need_be(table):
    assert ["x" * 500] in table("", [{"name": "x" * 500}])
