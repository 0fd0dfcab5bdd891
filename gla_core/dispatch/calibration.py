"""Predicted times, and their constants: shipped with a backend, or measured on this machine by `gla calibrate`.

The measurements are in one JSON file, calibration.json in the folder that GLA_CACHE_DIR names:

    {"NVIDIA H200, torch 2.11.0, triton 3.6.0, gla_core 0.1.0": {"mine 0.1.0": {"online_softmax": {"launch": 2e-5}}}}

Entries of another version or with other names of constants are ignored, and so is a file that cannot be read.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gla_core.dispatch import registry
from gla_core.dispatch.backend import (
    Backend,
    Constants,
    CostModel,
    KnownDevice,
    OpCall,
    is_constant,
    known_device,
    parts_of,
)
from gla_core.dispatch.environment import environment
from gla_core.files import write_json
from gla_core.installed import version_of

STAND_IN = "NVIDIA H200"
"""The device whose constants are used on a CUDA device that has not been measured."""

KNOWN_DEVICES = {name: KnownDevice(name, 132, (9, 0)) for name in (STAND_IN, "NVIDIA H100 80GB HBM3")}
"""The devices, by name, for which a call can be explained on any machine: see `OpCall.assumed`."""

_lock = threading.Lock()  # guards writing the file
registry.survive_fork(_lock)
_read_once: dict[str, dict] = {}


def _forget() -> None:
    # A new dict: another thread that is reading the file right now stores its content into the old one.
    global _read_once
    _read_once = {}


registry.on_change.append(_forget)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds, and where their constants come from. Each is None if there is none."""

    seconds: float | None
    source: str | None = None


def predict(backend: Backend, call: OpCall) -> Prediction:
    """Returns the prediction by which `auto` ranks: the backend's cost model with the best constants available.

    A call that is computed by calls of other ops takes the sum of their times.
    """
    if call.op in backend.ops and (parts := parts_of(backend.ops[call.op], call)):
        predictions = [(predict(backend, part), times) for part, times in parts]
        seconds = [each.seconds * times for each, times in predictions if each.seconds is not None]
        return Prediction(sum(seconds), predictions[0][0].source) if len(seconds) == len(parts) else Prediction(None)
    if not isinstance(backend.cost, CostModel):
        return Prediction(backend.predicted_seconds(call))
    constants, source = constants_for(backend, call)
    seconds = backend.predicted_seconds(call, constants)
    return Prediction(seconds, source if seconds is not None else None)


def constants_for(backend: Backend, call: OpCall) -> tuple[Constants, str | None]:
    """Returns the constants and facts for the formula of a backend's `CostModel`, and where the constants come from."""
    assert isinstance(backend.cost, CostModel)
    kind, facts = _device(call.device) if call.assumed is None else _described(call.assumed)
    known = calibrated(backend, call.op, call.device) if call.assumed is None else None
    if known is not None:
        return {**known, **facts}, "calibrated on this machine"
    shipped = backend.cost.constants
    for stand_in in (kind, STAND_IN) if call.device.type == "cuda" else (kind,):
        if call.op in shipped.get(stand_in, ()):
            return {**shipped[stand_in][call.op], **facts}, f"shipped for {stand_in}"
    return facts, None


def calibrated(backend: Backend, op: str, device: torch.device) -> Constants | None:
    """Returns the constants of an op that were measured on this machine with these versions, or None."""
    entry: Any = _file()
    for key in (_conditions(device_kind(device)), _versioned(backend), op):
        entry = entry.get(key) if isinstance(entry, dict) else None
    start = start_constants(backend, op, device)
    if not isinstance(entry, dict) or start is None or entry.keys() != start.keys():
        return None
    return entry if all(map(is_constant, entry.values())) else None


def start_constants(backend: Backend, op: str, device: torch.device) -> Constants | None:
    """Returns the shipped constants from which calibration starts: for this kind of device, else another; or None."""
    assert isinstance(backend.cost, CostModel)
    shipped = backend.cost.constants
    for kind in (device_kind(device), STAND_IN, *shipped):
        if op in shipped.get(kind, ()):
            return shipped[kind][op]
    return None


def device_kind(device: torch.device) -> str:
    """Returns the kind of a device, which decides its constants: the name of a CUDA device, the type of another."""
    return _device(device)[0]


def is_measured(device: KnownDevice) -> bool:
    """Returns whether the project's figures were measured on a GPU of the generation of this one."""
    kind = (device.vendor, device.compute_capability)
    return any((known.vendor, known.compute_capability) == kind for known in KNOWN_DEVICES.values())


def device_facts(device: torch.device) -> Constants:
    """Returns the facts about a device that formulas receive beside the constants."""
    return _device(device)[1]


@functools.cache
def _device(device: torch.device) -> tuple[str, Constants]:
    if device.type != "cuda":
        return device.type, {"multiprocessors": 1.0, "compute_capability": 0.0}
    return _described(known_device(device))


def _described(device: KnownDevice) -> tuple[str, Constants]:
    major, minor = device.compute_capability if device.vendor == "NVIDIA" else (0, 0)
    facts = {"multiprocessors": float(device.multiprocessors), "compute_capability": major + minor / 10}
    return device.name, facts


# ---- the file


def path() -> Path:
    """Returns the path of the file with the measurements on this machine."""
    return environment().cache_dir / "calibration.json"


def store(fitted: Mapping[str, Mapping[str, Constants]], device: torch.device) -> Path:
    """Stores measured constants, for this process and later ones, and returns the file that holds them.

    Args:
        fitted: maps the name of a backend to op to constants. The constants of other ops stay in the file.

    Raises:
        OSError: the file cannot be written.
    """
    installed = registry.installed()
    with _lock:
        content = _read(path())
        here = _dict(content, _conditions(device_kind(device)))
        for name, ops in fitted.items():
            section = _dict(here, _versioned(installed[name]))
            section.update((op, dict(constants)) for op, constants in ops.items())
        write_json(path(), content)
    registry.changed()  # the next call of every signature is ranked anew
    return path()


def _file() -> dict:
    once = _read_once
    if "content" not in once:
        once["content"] = _read(path())
    return once["content"]


def _read(file: Path) -> dict:
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}  # opening a FIFO would wait for its writer
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _dict(parent: dict, key: str) -> dict:
    if not isinstance(parent.get(key), dict):
        parent[key] = {}
    return parent[key]


def _versioned(backend: Backend) -> str:
    return f"{backend.name} {backend.version}"


@functools.cache
def _conditions(kind: str) -> str:
    triton, gla_core = (version_of(name) or "none" for name in ("triton", registry.OWN_DISTRIBUTION))
    return f"{kind}, torch {torch.__version__}, triton {triton}, gla_core {gla_core}"
