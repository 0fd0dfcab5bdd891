"""`gla doctor`: prints what is installed, which settings are in force, and what does not work."""

from __future__ import annotations

import os
import platform
import warnings
from typing import Any

import torch

import gla_core as gla
from gla_core.cli.backends import backend_row, last_line
from gla_core.dispatch import calibration, registry
from gla_core.dispatch.backend import Capabilities, CostModel, known_device, sentences
from gla_core.dispatch.environment import VARIABLES, Environment, environment
from gla_core.dispatch.errors import nearest
from gla_core.dispatch.request import INVARIANT, check, current_request
from gla_core.extras import extras, how_to_install, missing
from gla_core.installed import version_of
from gla_core.terminal import BAD, DOUBTFUL, GOOD, message, new_console, print_json, print_table, print_text

NOT_RUN = "the kernels are compiled for such a GPU in tests, and were not run on one"
WANTED = (
    "Please open an issue with the files of `gla conformance triton_fused --device cuda --report kit.json` "
    "and `gla bench --json bench.json`"
)


def doctor(as_json: bool) -> bool:
    """Prints the state of this installation; returns whether nothing is wrong."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        _print(report)
    return not report["problems"]


def _print(report: dict[str, Any]) -> None:
    console = new_console()
    print_text(console, "  ".join(f"{name} {number}" for name, number in report["versions"].items()))
    for device in report["devices"]:
        facts = ", ".join(f"{name} {value}" for name, value in device.items() if name != "device")
        print_text(console, f"{device['device']}: {facts}")
    variables = [{**row, "value": row["value"] or "unset"} for row in report["variables"]]
    print_table(console, variables, prose=("value", "effect"))
    print_table(console, report["request"])
    columns = ("name", "version", "ops", "devices", "plugin")
    backends = [{name: row[name] for name in columns} for row in report["backends"]]
    print_table(console, backends, spare=("plugin", "version"))
    print_table(console, report["calibration"])
    for row in report["notes"]:
        print_text(console, f"{row['backend']}: {row['note']}")
    for sentence in report["reports wanted"] + report["limits"]:
        print_text(console, sentence, DOUBTFUL)
    for extra, requirements in report["missing extras"].items():
        lacking = f"extra {extra!r}: {', '.join(requirements)} not installed; {how_to_install(extra)}"
        print_text(console, lacking, DOUBTFUL)
    for name, error in report["quarantine"].items():
        print_text(console, f"plugin {name!r} failed to load:\n{error}", BAD)
    for problem in report["problems"]:
        print_text(console, f"problem: {problem}", BAD)
    verdict = ("something is wrong", BAD) if report["problems"] else ("all is well", GOOD)
    print_text(console, *verdict)


def examine() -> dict[str, Any]:
    """Returns the state of this installation, as JSON values.

    'problems' has a sentence for each fault, 'limits' for each backend that cannot run on this machine, and 'reports
    wanted' for each kind of GPU here on which the project has not run its kernels.
    """
    settings: Environment | None = None
    backends: list[gla.BackendInfo] = []
    request: list[dict[str, str]] = []
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gla.reload_environment()
        try:
            settings = environment()
            backends = gla.backends()
            request = request_in_force()
        except (ValueError, LookupError) as error:
            problems.append(message(error))
    broken = {info.name: info.error for info in backends if info.error is not None}
    problems += [str(warning.message) for warning in caught]
    problems += [f"plugin {name!r} failed to load: {last_line(error)}" for name, error in broken.items()]
    if settings is not None and len(backends) == len(broken):
        problems.append("no backend works; reinstall gla-core, which carries some, and look at GLA_BLOCK_PLUGINS")
    devices = _devices()
    names = dict.fromkeys(device["name"] for device in devices if device.get("kernels") == "compiled, not run")
    return {
        "versions": {
            "python": platform.python_version(),
            "gla_core": gla.__version__,
            "torch": torch.__version__,
            "triton": version_of("triton") or "not installed",
        },
        "devices": devices,
        "reports wanted": [f"{name}: {NOT_RUN}. {WANTED}" for name in names],
        "variables": _variables(settings),
        "request": request,
        "backends": [backend_row(info) for info in backends if info.error is None],
        "calibration": [] if settings is None else _calibration(),
        "notes": [] if settings is None else _notes(),
        "limits": [] if settings is None else limits(),
        "missing extras": {extra: lacking for extra in extras() if (lacking := missing(extra))},
        "quarantine": broken,
        "problems": problems,
    }


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        properties, known = torch.cuda.get_device_properties(index), known_device(torch.device("cuda", index))
        facts = {
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "kernels": "measured" if calibration.is_measured(known) else "compiled, not run",
        }
        devices.append({"device": f"cuda:{index}", **facts})
    return devices


def _devices_here() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _calibration() -> list[dict[str, Any]]:
    """Returns the ops whose constants were measured on this machine, by device and backend."""
    rows = []
    for device in _devices_here():
        for backend in registry.installed().values():
            known = isinstance(backend.cost, CostModel)
            ops = [op for op in backend.ops if known and calibration.calibrated(backend, op, device)]
            if ops:
                rows.append({"device": str(device), "backend": backend.name, "calibrated": ops})
    return rows


def _notes() -> list[dict[str, str]]:
    """Returns the notes of each backend on this machine. If a backend raises, that is its note."""
    return [
        {"backend": backend.name, "note": note}
        for backend in registry.installed().values()
        if backend.notes is not None
        for note in sentences("notes", backend.notes)
    ]


def limits() -> list[str]:
    """Returns a sentence for each backend that cannot run on any device of this machine, by its capabilities."""
    limits_here = []
    for backend in registry.installed().values():
        needed = list(dict.fromkeys(map(backend.can, backend.ops)))
        if needed and not any(_satisfies(device, can) for can in needed for device in _devices_here()):
            limits_here.append(f"{_what_is_missing(needed)}: {backend.name} cannot run")
    return limits_here


def _satisfies(device: torch.device, can: Capabilities) -> bool:
    if can.devices is not None and device.type not in can.devices:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= can.min_compute_capability


def _what_is_missing(needed: list[Capabilities]) -> str:
    types = sorted({type for can in needed for type in can.devices or ()})
    if "cuda" in types and torch.cuda.device_count():
        major, minor = min(can.min_compute_capability for can in needed)
        return f"no CUDA device of compute capability {major}.{minor}"
    return f"no {' or '.join(types).upper()} device"


def _variables(settings: Environment | None) -> list[dict[str, str | None]]:
    """Returns every GLA_* variable, and what it does."""
    unknown = sorted(name for name in os.environ if name.startswith("GLA_") and name not in VARIABLES)
    effects = dict.fromkeys(VARIABLES, "the settings cannot be read") if settings is None else _effects(settings)
    effects |= {name: f"none, the name is unknown{nearest(name, VARIABLES)}" for name in unknown}
    return [{"name": name, "value": os.environ.get(name), "effect": effect} for name, effect in effects.items()]


def _effects(settings: Environment) -> dict[str, str]:
    blocked = ", ".join(sorted(settings.blocked_plugins))
    invariant = settings.batch_invariant
    return {
        "GLA_BACKEND": f"the default request is {settings.backend or 'auto'}; backend= and use_backend override it",
        "GLA_BATCH_INVARIANT": f"results do not depend on the batch; segments have {invariant} tokens"
        if invariant not in ("", "0")
        else "results may depend on the batch in their last bits",
        "GLA_BLOCK_PLUGINS": f"not imported: {blocked}" if blocked else "every plugin is imported",
        "GLA_CACHE_DIR": f"gla calibrate stores its measurements in {settings.cache_dir}",
        "GLA_CHECK": f"tensor values are {'checked' if settings.check_values else 'not checked'}",
        "GLA_CHECKPOINTS": f"on a GPU, states are {'kept' if settings.checkpoints else 'not kept'} for the backward",
        "GLA_GRAPHS": f"on a GPU, repeated calls {'become' if settings.graphs else 'do not become'} CUDA graphs",
        "GLA_KEEP_MEMORY": f"on a CPU, freed memory is {'kept' if settings.keep_memory else 'left to the C library'}",
        "GLA_VLLM_LAYERS": f"gla_vllm replaces {os.environ.get('GLA_VLLM_LAYERS', '').strip() or 'no'} layers of vLLM",
    }


def request_in_force() -> list[dict[str, str]]:
    """Returns the request in force for each op, and where it comes from.

    Raises:
        ValueError, LookupError: the request cannot be read, or names an op or a backend that does not exist.
    """
    request = current_request()
    choices = check(request.spec, "GLA_BACKEND")
    rows = [{"op": op, "request": str(choice), "source": choice.source} for op, choice in choices.items()]
    if request.batch_invariant is not None:
        rows.append({"op": INVARIANT, "request": str(request.batch_invariant), "source": "GLA_BATCH_INVARIANT"})
    return rows
