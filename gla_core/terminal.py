"""Output of the commands: a console that is as wide as needed, wrapped sentences, and tables that cut no name."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

GOOD, BAD, DOUBTFUL = "green", "red", "yellow"
"""Styles of verdicts and winners. rich leaves them out if output is piped or NO_COLOR is set."""

_UNLIMITED = 10_000
_READABLE = 20  # characters in a line of prose
_FRAME = 2  # characters that a table takes for each column, besides its text

_Item = TypeVar("_Item")


def new_console(stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal; without a terminal and COLUMNS, as wide as the content needs."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if known else _UNLIMITED)


def print_text(console: Console, text: str, style: str = "", hang: int = 2) -> None:
    """Prints lines, wrapped between words on a terminal. If output is piped, each stays one line.

    Args:
        style: a style of rich, such as `GOOD`.
        hang: number of spaces to indent the continuation of a wrapped line, in addition to the line's indentation.
    """
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + hang)
        if console.is_terminal:
            line = textwrap.fill(
                line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        console.print(Text(line, style), soft_wrap=True)


def print_explanation(console: Console, explanation: object) -> None:
    """Prints an `Explanation`, with the line of the winner (marked "->") or the refusal of all in a colour."""
    lines = str(explanation).splitlines()
    for number, line in enumerate(lines):
        winner, candidate = line.startswith(" ->"), line.startswith((" ->", "    "))
        style = "bold" if number == 0 else GOOD if winner else BAD if line.startswith("no backend can run") else ""
        print_text(console, line, style, hang=17 if candidate else 2)


def print_json(value: Any) -> None:
    """Prints JSON for other programs."""
    print(json.dumps(value, indent=2))


def message(error: BaseException) -> str:
    """Returns the message of an error, which `str()` of a KeyError would put between quotes."""
    return str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)


def progress(console: Console, items: Sequence[_Item], title: Callable[[_Item], str]) -> Iterator[_Item]:
    """Yields the items. On a terminal, a progress bar names the one in progress.

    Args:
        title: returns the name of an item in a few words.
    """
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        _TimeLeft(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.file.isatty()) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=title(item), refresh=True)
            yield item
            bar.advance(task)


class _TimeLeft(TimeRemainingColumn):
    """Shows the time left, or nothing until it is known."""

    def render(self, task: Task) -> Text:
        return Text("") if task.time_remaining is None else super().render(task)


def print_table(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    title: str | None = None,
    spare: Sequence[str] = (),
    prose: Collection[str] = (),
    numbers: Collection[str] = (),
    styles: Sequence[str] = (),
) -> None:
    """Prints rows, which all have the same keys, as a table that fits the console, with fewer columns if necessary.

    A column without values is left out. The values of a list stand side by side, and continue in the next line if
    there is no room.

    Args:
        spare: columns to leave out if there is no room, the first one first.
        prose: columns whose text may continue in the next line; all others stay whole.
        numbers: columns to align to the right.
        styles: a style of rich for each row.
    """
    names = [name for name in rows[0] if any(row[name] not in (None, "", []) for row in rows)] if rows else []
    if not names:
        return
    widths = {name: _least_and_most(name, [row[name] for row in rows], name in prose) for name in names}
    for name in filter(names.__contains__, spare):
        if sum(widths[n][0] + _FRAME for n in names) <= console.width:
            break
        names.remove(name)
    shared = _shared([widths[name] for name in names], console.width - _FRAME * len(names))
    # The terminal folds what is still too wide, so no text is lost.
    width = sum(shared) + _FRAME * len(names)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", width=width)
    table.title = title
    for name, width in zip(names, shared, strict=True):
        table.add_column(name, width=width, justify="right" if name in numbers else "left")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*(_cell(row[name]) for name in names), style=style)
    console.print(table, crop=False)


def _least_and_most(name: str, values: Sequence[Any], prose: bool) -> tuple[int, int]:
    """Returns the widths that a column needs and can use. No name is cut, and a short list stays on one line."""
    cells = (name, *map(_cell, values))
    most = max(cell_len(line) for cell in cells for line in cell.split("\n"))
    if prose:
        return min(most, _READABLE), most
    if most > _READABLE and any(isinstance(value, list) for value in values):
        return max(cell_len(word) for cell in cells for word in cell.split()), most
    return most, most


def _shared(widths: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Returns widths that share the room: each column gets what it needs, and the rest is split in proportion."""
    lacking = sum(most - least for least, most in widths)
    left = min(lacking, max(0, room - sum(least for least, _ in widths)))
    return [least + (left * (most - least) // lacking if lacking else 0) for least, most in widths]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "-" if value is None else str(value)
