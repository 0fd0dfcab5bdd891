"""The report of a run: a summary or every case as JSON, and a table at the end of the run."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gla_core as gla
from gla_core.conformance.cases import DTYPES, dtypes_of, may_return_checkpoints, short
from gla_core.conformance.diagnosis import KINDS, diagnosis, kind
from gla_core.conformance.subject import sources
from gla_core.conformance.summary import (
    NAMED,
    by_property,
    case_name,
    complaint,
    counts,
    finite,
    properties,
    property_of,
    reasons,
    table,
)
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities
from gla_core.files import check_writable, write_json
from gla_core.installed import driver, version_of

FORMAT = 2
"""Version of the summary's layout."""
RED = {"red": True}


class Report:
    """A pytest plugin that collects the outcome of every case, prints a table, and writes JSON if asked.

    Args:
        path: file to write. It gets a line for every case if its name ends in .jsonl, else a summary. None means no
            file.
        commit: source revision to note in the summary.

    Raises:
        pytest.UsageError: the file cannot be written.
    """

    def __init__(self, backend: Backend, device: str, path: str | None = None, commit: str | None = None) -> None:
        if path is not None:
            try:
                check_writable("--report", Path(path))
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None
        self._backend, self._device, self._path, self._commit = backend, device, path, commit
        self.rows: list[dict[str, Any]] = []
        self._broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = list(report.user_properties)
        case = dict(properties).get("case")
        if case is None or not (report.when == "call" or report.failed):
            return
        outcome = "open" if report.skipped else report.outcome
        errors = [value for name, value in properties if name == "error"]
        wrong = [value for name, value in properties if name == "wrong"]
        reason = _reason(report) or "".join(value for name, value in properties if name == "refusal") or None
        self.rows.append({**case, "outcome": outcome, "reason": reason, "errors": errors, "wrong": wrong})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(f"{Path(report.fspath).name}: {_reason(report)}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Writes the report, and prints its short form below everything that pytest prints."""
        result = yield
        if self._path is not None:
            self._write(Path(self._path))
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and (self.rows or self._broken):
            terminal.section(f"conformance of {self._backend.name} {self._backend.version} on {self._device}")
            listed, verbose = terminal.hasopt("f"), session.config.get_verbosity() > 0
            for line, markup in self._lines(not listed, verbose):
                terminal.write_line(line, **markup)
        return result

    def _write(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            write_json(path, self.summary())
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        cases = ({**row, "errors": [finite(error) for error in row["errors"]]} for row in self.rows)
        path.write_text("".join(json.dumps(case, allow_nan=False) + "\n" for case in cases))

    def _lines(self, with_failures: bool, verbose: bool) -> Iterator[tuple[str, dict[str, bool]]]:
        """Yields the lines of the report on the screen, each with its colour."""
        failed = [row for row in self.rows if row["outcome"] == "failed"]
        yield from _plain(sources(self._backend))
        if with_failures:  # pytest itself does not list them
            yield from ((line, RED) for line in _failures(failed, verbose))
            yield from ((f"ERROR {broken}", RED) for broken in self._broken)
        yield from _plain(_not_declared_in_short(self._backend))
        yield from _plain(f"open: {why['reason']} ({why['cases']} cases)" for why in reasons(self.rows, "open"))
        # A passed case of an undeclared op only shows that it is refused.
        rows = [row for row in self.rows if row["op"] in self._backend.ops or row["outcome"] != "passed"]
        yield from _plain(table(rows))
        on = " --device cuda" if self._device == "cuda" else ""
        yield from _plain(diagnosis(self.rows, f"gla conformance {self._backend.name}{on}"))
        yield self._verdict(), {"bold": True, "red" if failed or self._broken else "green": True}

    def _verdict(self) -> str:
        total, name = counts(self.rows), self._backend.name
        still_open = f"; {total['open']} are open" if total["open"] else ""
        if self._broken:
            return f"{name} could not be judged: {len(self._broken)} files of the kit could not be collected"
        if total["failed"]:
            return f"{name} FAILED {total['failed']} of {len(self.rows)} cases{still_open}"
        return f"{name} passed {total['passed']} of {len(self.rows)} cases{still_open}"

    def summary(self) -> dict[str, Any]:
        """Returns the summary of the run; `gla_core/conformance/README.md` explains its keys."""
        backend = self._backend
        differing = {op: _capabilities(can) for op, can in backend.op_capabilities.items()}
        declared = {"ops": list(backend.ops), **_capabilities(backend.capabilities), "op_capabilities": differing}
        return {
            "format": FORMAT,
            "backend": {"name": backend.name, "version": backend.version},
            "versions": {
                "gla_core": gla.__version__,
                "torch": torch.__version__,
                "triton": version_of("triton"),
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "device": _device(self._device),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": self._commit,
            "declared": declared,
            "not_declared": not_declared(backend),
            "counts": counts(self.rows),
            "failed": reasons(self.rows, "failed"),
            "open": reasons(self.rows, "open"),
            "properties": properties(self.rows),
        }


def _plain(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, bool]]]:
    return ((line, {}) for line in lines)


def _not_declared_in_short(backend: Backend) -> Iterator[str]:
    """Yields the limits of the capabilities: a line for undeclared ops, one for common limits, one for each op."""
    ops = [op for op in OP_PARAMETERS if op not in backend.ops]
    if ops:
        yield f"not declared: {', '.join(ops)} (calls of them are refused)"
    common = _left_out(backend.capabilities, backend.ops)
    if common:
        yield f"not declared: {', '.join(common)}"
    for op, can in backend.op_capabilities.items():
        others = [line for line in _left_out(can, [op]) if line not in common]
        if others:
            yield f"not declared for {op}: {', '.join(others)}"


def not_declared(backend: Backend) -> list[str]:
    """Returns the limits of the capabilities, one sentence each; a limit of a single op begins with the op's name."""
    limits = [f"op {op}" for op in OP_PARAMETERS if op not in backend.ops]
    limits += _left_out(backend.capabilities, backend.ops)
    for op, can in backend.op_capabilities.items():
        limits += [f"{op}: {line}" for line in _left_out(can, [op])]
    return limits


FLAGS = ("variable_length", "grouped_queries", "gradients", "checkpoints", "deterministic", "cuda_graphs")


def _left_out(can: Capabilities, ops: Iterable[str]) -> list[str]:
    flags = [name for name in FLAGS if name != "checkpoints" or any(map(may_return_checkpoints, ops))]
    return [
        *(f"dtype {short(dtype)}" for dtype in DTYPES if dtype not in can.dtypes),
        *(name for name in flags if not getattr(can, name)),
        *(f"{name} beyond {_span(can, name)}" for name in ("key_widths", "value_widths") if _span(can, name)),
    ]


def _capabilities(can: Capabilities) -> dict[str, Any]:
    return {
        "devices": None if can.devices is None else sorted(can.devices),
        "dtypes": [short(dtype) for dtype in dtypes_of(can)],
        "min_compute_capability": list(can.min_compute_capability),
        "key_widths": _span(can, "key_widths"),
        "value_widths": _span(can, "value_widths"),
        **{name: getattr(can, name) for name in FLAGS},
    }


def _span(can: Capabilities, name: str) -> str | None:
    """Returns the text of a range of widths; None if all widths are declared."""
    widths = getattr(can, name)
    return None if widths == getattr(Capabilities(), name) else str(widths)


def _failures(failed: Sequence[dict[str, Any]], verbose: bool) -> Iterator[str]:
    """Yields failed cases, a line each, root causes first; only the first few of each property unless `verbose`."""
    for group in by_property(sorted(failed, key=lambda row: KINDS.index(kind(row)))):
        shown = group if verbose else group[:NAMED]
        yield from (f"FAILED {case_name(row)}: {complaint(row)}" for row in shown)
        if len(shown) < len(group):
            yield f"       and {len(group) - len(shown)} more of {property_of(group[0])} (-v shows all)"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Returns the message of a failure or a skip, in one line without paths."""
    if report.skipped and isinstance(report.longrepr, tuple):
        text = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
    else:
        return None
    first = text.strip().splitlines()[0] if text.strip() else ""
    return re.sub(r"(?:/[^\s/'\":]+)+/([^\s/'\":]+)", r"\1", first)[:300]


def _device(kind: str) -> dict[str, str | None]:
    if kind != "cuda":
        return {"type": kind, "name": platform.machine()}
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return {"type": kind, "name": name, "compute_capability": f"{major}.{minor}", "driver": driver()}
