"""`gla backends`: the installed backends, and the plugins that failed to load."""

from __future__ import annotations

from typing import Any

import gla_core as gla
from gla_core.dispatch.backend import GATES
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.checks import FLOATS
from gla_core.ops.spec import Role
from gla_core.terminal import BAD, new_console, print_json, print_table, print_text


def backends(as_json: bool) -> bool:
    """Prints the installed backends; returns whether every plugin could be loaded."""
    rows = [backend_row(info) for info in gla.backends()]
    broken = [row for row in rows if row["load error"]]
    if as_json:
        print_json(rows)
    else:
        console = new_console()
        # A narrow terminal has no room for the forms of gates.
        shown = [{name: value for name, value in row.items() if name != "gates"} for row in rows if row not in broken]
        print_table(console, shown, spare=("plugin", "version", "devices"))
        for row in broken:
            print_text(console, f"plugin {row['name']!r} failed to load: {row['load error']}", BAD)
    return not broken


def backend_row(info: gla.BackendInfo) -> dict[str, Any]:
    """Returns the row of a backend in the table: column name to value."""
    can, gated = info.capabilities, any(ABSTRACT_OPS[op].has(Role.GATE) is not None for op in info.ops)
    return {
        "name": info.name,
        "version": info.version,
        "ops": list(info.ops),
        "devices": [] if can is None else sorted(can.devices) if can.devices is not None else ["any"],
        "dtypes": [] if can is None else [str(dtype).removeprefix("torch.") for dtype in FLOATS if dtype in can.dtypes],
        "gates": [] if can is None or not gated else [form for form in GATES if form in can.gates],
        "plugin": info.plugin,
        "load error": None if info.error is None else last_line(info.error),
    }


def last_line(traceback: str) -> str:
    """Returns the line of a traceback that says what went wrong."""
    return traceback.strip().splitlines()[-1]
