"""What the commands print: a console as wide as its reader needs, and tables in which no name is cut."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNLIMITED = 10_000
_READABLE = 20  # characters in a line of prose


def new_console() -> Console:
    """A console of the terminal's width; without a terminal, and no COLUMNS, as wide as the content needs."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(markup=False, highlight=False, width=None if known else _UNLIMITED)


def print_json(value: Any) -> None:
    """Print JSON for other programs."""
    print(json.dumps(value, indent=2))


def message(error: BaseException) -> str:
    """What an error says; `str()` of a KeyError would put it between quotes."""
    return str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)


def print_table(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    title: str | None = None,
    spare: Sequence[str] = (),
    prose: Collection[str] = (),
    numbers: Collection[str] = (),
) -> None:
    """Print rows of the same keys as a table that fits the console, if need be with fewer columns.

    A column that nobody fills is left out. The values of a list stand side by side where there is room for that, else
    below each other.

    Args:
        spare: columns to leave out where there is no room, the first one first.
        prose: columns whose text may go on in the next line; all others stay whole.
        numbers: columns to align to the right.
    """
    names = [name for name in rows[0] if any(row[name] not in (None, "", []) for row in rows)] if rows else []
    if not names:
        return
    side_by_side = _table(names, rows, ", ", title, prose, numbers)
    if _width(console, side_by_side).maximum <= console.width:
        console.print(side_by_side)
        return
    table = _table(names, rows, "\n", title, prose, numbers)
    for name in filter(names.__contains__, spare):
        if _width(console, table).minimum <= console.width:
            break
        names.remove(name)
        table = _table(names, rows, "\n", title, prose, numbers)
    least = _width(console, table).minimum
    table.width = least if least > console.width else None
    console.print(table, crop=False)  # what is still too wide is left to the terminal to fold: nothing is lost


def _table(
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    separator: str,
    title: str | None,
    prose: Collection[str],
    numbers: Collection[str],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in names:
        cells = [_cell(row[name], separator) for row in rows]
        widest = max(cell_len(line) for cell in (name, *cells) for line in cell.split("\n"))
        unbroken = name not in prose
        justify = "right" if name in numbers else "left"
        table.add_column(
            name, justify=justify, no_wrap=unbroken, min_width=widest if unbroken else min(widest, _READABLE)
        )
    for row in rows:
        table.add_row(*(_cell(row[name], separator) for name in names))
    return table


def _cell(value: Any, separator: str) -> str:
    if isinstance(value, list):
        return separator.join(value)
    return "-" if value is None else str(value)


def _width(console: Console, table: Table) -> Measurement:
    return Measurement.get(console, console.options.update(width=_UNLIMITED, max_width=_UNLIMITED), table)
