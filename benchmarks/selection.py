"""Checks whether the backend that `auto` picks is the fastest: times every backend on every call of a grid.

`evidence.py selection` runs it.

The shapes of the grid are drawn at random from a fixed seed, with B*H from 1 to 512 and T from 1 to 131,072;
`gla calibrate` uses none of them. Backends that predict no time are left out, since `auto` ranks them last. For packed
sequences in the grid `auto` knows a bound of their lengths. The file has more parts: the backward of some of these
shapes, with checkpoints as in training; other forms of gates, groups of value heads and float16; packed sequences with
several distributions of lengths, which `auto` does not know; other ops; and the lengths of the crossover that
benchmarks/crossover.py draws. On a CPU it has the other ops alone, as the reference alone computes chunk_gla there. A
second run keeps the rows of the first, unless the device, a version, the commit or a constant has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from record import free_memory

from gla_core.bench import calibrate, measure, results
from gla_core.bench.calls import calls_for, run_once
from gla_core.dispatch import registry
from gla_core.dispatch.backend import CHUNK, CostModel, KnownDevice, OpCall
from gla_core.dispatch.calibration import KNOWN_DEVICES, constants_for
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import Explanation, explain_call
from gla_core.files import write_json
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.gla import BACKWARD, FORWARD, STEP
from gla_core.workloads.inputs import random_arguments

CLOSE = 1.05
"""The ratio to the fastest time up to which a pick counts as right."""
CLOSE_UNKNOWN = 1.15
"""The same ratio for other forms of gates, and if the lengths of packed sequences are not known."""
HOPELESS = 20
"""The predicted ratio to the best time above which a backend is left out, if its predicted time is above `LONG`."""
LONG = 10e-3
ROUNDS = 3
"""The number of rounds in which the backends take turns, so that a drifting clock affects all of them."""
WIDTHS = (*[(128, 128)] * 4, *[(64, 64)] * 2, (64, 128), (128, 64), (96, 192), (128, 256), (256, 128), (256, 256))
GRID = 72
MOST = 2**22
"""The largest number of tokens, counted for each head, of a call of the grid and of the crossover."""
BACKWARDS = 36
FORMS = 30
LENGTHS = ("equal", "uniform", "log-uniform", "one giant", "single tokens")
CALLS_PER_KIND = 20

Row = dict[str, Any]
Shape = tuple[int, int, int, int, int, int | None]


# ---- calls to measure


def calls(device: torch.device) -> Iterator[tuple[str, OpCall]]:
    """Yields every call with its part, such as 'grid' or 'packed, equal'. Small calls come again, in a CUDA graph."""
    if device.type != "cuda":
        yield from (("other ops", call) for call in other_calls(device))
        return
    for B, H, T, K, V, N in shapes():
        call = chunk_call(device, B, H, T, K, V, N)
        yield "grid", call
        if B * H * T <= 2**17:
            yield "grid", dataclasses.replace(call, capturing=True)
    for B, H, T, K, V, N in shapes()[:BACKWARDS]:
        yield "backward", backward_of(chunk_call(device, B, H, T, K, V, N))
    yield from form_calls(device)
    yield from packed_calls(device)
    for call in other_calls(device):
        yield "other ops", call
        if call.op == STEP.name:
            yield "other ops", dataclasses.replace(call, capturing=True)
    for heads in (1, 4, 16, 64):  # 128 heads fill a GPU: both backends run the same kernel
        for T in (2**n for n in range(8, 18)):
            if heads * T <= MOST:
                yield "crossover", chunk_call(device, max(1, heads // 16), min(heads, 16), T, 128, 128)


def shapes() -> list[Shape]:
    """Returns the shapes of the grid: B, H, T, K, V, and the number of packed sequences, None for other calls."""
    most_heads, most_tokens = 512, 2**17
    random = Random(5)

    def between(low: float, high: float) -> int:
        return round(low * (high / low) ** random.random())

    corners = ((2, most_tokens, 128), (most_heads, 1, 128), (1, 1, 96), (1, most_tokens - 1, 64))
    made: list[Shape] = [(1, H, T, K, K, None) for H, T, K in corners]
    while len(made) < GRID:
        heads, T = between(1, most_heads), between(16, most_tokens)
        K, V = random.choice(WIDTHS)
        H = min(heads, random.choice((2, 4, 8, 16, 32)))
        if not T & (T - 1) or heads * T * (K + V) / 256 > MOST:
            continue
        packed = random.random() < 0.25 and T >= 64
        N = between(2, min(128, T // 16)) if packed else None
        shape = (1 if packed else max(1, heads // H), H, T, K, V, N)
        if shape not in made:
            made.append(shape)
    return made


def chunk_call(device: torch.device, B: int, H: int, T: int, K: int, V: int, N: int | None = None) -> OpCall:
    """Returns a forward of chunk_gla in bfloat16 with float32 gates, as in models; packed if N is given."""
    longest = None if N is None else min(T, -(-2 * T // N))
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V, "N": N or B}
    return _call(FORWARD.name, device, sizes, variable_length=N is not None, longest=longest)


def _call(op: str, device: torch.device, sizes: dict[str, int], **facts: Any) -> OpCall:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return ABSTRACT_OPS[op].call(sizes, device, dtype, **facts)


def backward_of(call: OpCall) -> OpCall:
    """Returns the backward of a call, with checkpoints as in training."""
    return dataclasses.replace(call, op=BACKWARD.name, scalars={"checkpoint_every": CHUNK})


def form_calls(device: torch.device) -> Iterator[tuple[str, OpCall]]:
    """Yields calls with gates of other forms, value heads in groups, and float16: forwards, and half of the backwards.

    The shapes are every second one of the grid.
    """
    random, sizes = Random(7), [shape for shape in shapes() if shape[1] > 1]
    for i in range(FORMS):
        B, H, T, K, V, N = sizes[2 * i]
        call, groups = chunk_call(device, B, H, T, K, V, N), random.choice([n for n in (1, 1, 2, H) if H % n == 0])
        call = dataclasses.replace(
            call,
            dims=ABSTRACT_OPS[call.op].dims({**call.dims, "H": H // groups, "Hq": H // groups, "Hv": H}),
            gate_form=("head", "constant", None, "head", "key")[i % 5],
            dtype=torch.float16 if i % 5 > 2 else call.dtype,
        )
        call = call if call.gate_form else dataclasses.replace(call, gate_dtype=None)
        yield "forms", call
        if i % 2:
            yield "forms", backward_of(call)


def packed_calls(device: torch.device) -> Iterator[tuple[str, OpCall]]:
    """Yields calls with packed sequences of unknown lengths: the forward of all, the backward of half of them."""
    random = Random(6)
    for kind in LENGTHS:
        for i in range(CALLS_PER_KIND):
            N, T = round(2 * 256 ** random.random()), round(1000 * 100 ** random.random())
            H, K, V = random.choice((4, 8, 16, 32)), random.choice((64, 128, 256)), random.choice((64, 128, 256))
            T = max(N, min(T, 2**29 // (H * (K + V))))
            call = dataclasses.replace(chunk_call(device, 1, H, T, K, V, N), longest=None)
            yield f"packed, {kind}", call
            if i % 2:
                yield f"packed, {kind}", backward_of(call)


def lengths(kind: str, T: int, N: int) -> list[int]:
    """Returns the lengths of N sequences of at least one token, T in total; equal arguments give equal lengths."""
    random = Random(f"{kind} {T} {N}")
    weights = {
        "equal": lambda i: 1.0,
        "uniform": lambda i: random.random(),
        "log-uniform": lambda i: 1000 ** random.random(),
        "one giant": lambda i: 1.0 if i else N * random.uniform(0.5, 10),
        "single tokens": lambda i: 1.0 if i % 4 == 0 else 0.0,
    }[kind]
    shares = [weights(i) for i in range(N)]
    random.shuffle(shares)
    ends = [0, *(N * end / sum(shares) for end in itertools.accumulate(shares))]
    offsets = [round(end / N * (T - N)) + i for i, end in enumerate(ends)]
    return [end - start for start, end in itertools.pairwise(offsets)]


def other_calls(device: torch.device) -> Iterator[OpCall]:
    """Yields calls of the other ops."""
    cuda = device.type == "cuda"
    for B in (1, 3, 24, 100, 500) if cuda else (1, 3, 24):
        yield _call(STEP.name, device, {"B": B, "H": 12, "K": 128, "V": 128})
    many = ((1, 1000), (3, 100_000), (1, 5_000_000), (6, 10_000_000), (64, 200_000), (300, 30_000), (5000, 3000))
    few = ((1, 1000), (3, 100_000), (64, 3000), (700, 100))
    for rows, columns in many if cuda else few:
        yield _call("online_softmax", device, {"rows": rows, "columns": columns})
    decode = (
        (1, 1, 5000, 8, 1),
        (2, 1, 50_000, 16, 1),
        (1, 1, 100_000, 4, 2),
        (4, 1, 20_000, 8, 4),
        (96, 1, 900, 16, 1),
    )
    prefill = ((1, 3000, 3000, 16, 1), (8, 700, 700, 8, 1), (1, 16, 30_000, 8, 2), (2, 300, 6000, 8, 1))
    small = ((1, 1, 3000, 4, 1), (2, 300, 300, 4, 1), (1, 20, 700, 2, 2))
    for B, Tq, Tk, H, G in (*decode, *prefill) if cuda else small:
        sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "Hq": H * G, "K": 128, "V": 128}
        yield _call("softmax_attention", device, sizes)


# ---- measuring


def measure_row(part: str, call: OpCall, seconds: float) -> Row:
    """Times every backend that can run the call, with `seconds` of timed calls each."""
    explanation, arguments = explain(call), arguments_of(call, _lengths_of(part, call))
    times, left_out = time_backends(call, arguments, *_worth_timing(explanation), seconds)
    measured = {name: rounded(time) for name, time in times.items()}
    return judged({"part": part, **as_json(call), **_picked(explanation), "measured": measured, "left_out": left_out})


def _picked(explanation: Explanation) -> Row:
    predicted = {c.name: rounded(c.seconds) for c in explanation.candidates if c.refusal is None}
    return {"predicted": predicted, "pick": explanation.winner}


def arguments_of(call: OpCall, tokens: Sequence[int] | None) -> tuple[Any, ...]:
    """Returns random arguments; `tokens` gives the lengths of packed sequences."""
    arguments = random_arguments(call)
    if tokens is None:
        return arguments
    at = ABSTRACT_OPS[call.op].parameters.index("cu_seqlens")
    ends = torch.tensor([0, *tokens]).cumsum(0)
    return (*arguments[:at], ends.to(arguments[at]), *arguments[at + 1 :])


def _lengths_of(part: str, call: OpCall) -> list[int] | None:
    """Returns the lengths of the packed sequences of a call, if its part names a kind of lengths."""
    _, _, kind = part.partition(", ")
    return lengths(kind, call.dims["T"], call.dims["N"]) if kind else None


def judged(row: Row) -> Row:
    """Returns the row with the fastest backend, and the ratio of the pick's time to the fastest."""
    times = row["measured"]
    best, chosen = min(times.values(), default=math.nan), times.get(row["pick"])
    fastest = min(times, key=times.__getitem__, default=None)
    return {**row, "fastest": fastest, "ratio": rounded(chosen and chosen / best)}


def quickest(row: Row, again: Row) -> Row:
    """Merges two measurements of one call into their minimum, since disturbances of a machine only add time."""
    times = [run["measured"] for run in (row, again)]
    both = {name: min(run[name] for run in times if name in run) for name in {**times[0], **times[1]}}
    return judged({**again, "measured": both})


def rounded(x: float | None) -> float | None:
    return x and float(f"{x:.4g}")


def explain(call: OpCall) -> Explanation:
    return explain_call(call, current_request("auto"))


def as_json(call: OpCall) -> Row:
    """Returns the call as JSON values."""
    flags = {"packed": call.variable_length, "graph": call.capturing}
    fields = {"op": call.op, "dims": dict(call.dims), **{name: True for name, flag in flags.items() if flag}}
    if call.op.startswith("chunk_gla") and (call.gate_form != "key" or call.dtype == torch.float16):
        fields |= {"form": call.gate_form or "none", "dtype": str(call.dtype).removeprefix("torch.")}
    return fields


def _worth_timing(explanation: Explanation) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the backends to time, and the reasons why others are left out."""
    able = [c for c in explanation.candidates if c.refusal is None]
    predicted = {c.name: c.seconds for c in able if c.seconds is not None}
    best = min(predicted.values(), default=math.inf)
    slow = {name: seconds / best for name, seconds in predicted.items() if seconds > max(LONG, HOPELESS * best)}
    reasons = {name: f"predicted to take {times:.0f} times as long as the best" for name, times in slow.items()}
    if predicted:
        reasons |= {c.name: "predicts no time, so others come first" for c in able if c.seconds is None}
    return [c.name for c in able if c.name not in reasons], reasons


def time_backends(
    call: OpCall, arguments: tuple[Any, ...], names: Sequence[str], left_out: dict[str, str], seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the seconds of each backend that ran, in its fastest round, and the reasons why others did not run.

    A round gives a median. The backends take turns, and each round begins with a different backend, because a call
    after a slow backend takes longer on the host. Disturbances of a machine only add time.
    """
    timer = measure.time_graph if call.capturing else measure.time_calls
    rounds = 1 if call.capturing else ROUNDS
    calls_of: dict[str, list] = {}
    times_of: dict[str, list[float]] = {}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            if name in left_out:
                continue
            try:
                if name not in calls_of:
                    calls_of[name] = calls_for(name, call, arguments)
                timing = timer(calls_of[name], call.device, seconds / rounds)
                times_of.setdefault(name, []).append(timing.seconds)
            except Exception as error:  # out of memory, or a kernel that cannot be built
                left_out = {**left_out, name: f"{type(error).__name__}: {error}"[:200]}
    del arguments, calls_of
    free_memory()
    return {name: min(times) for name, times in times_of.items() if name not in left_out}, left_out


def compile_share(device: torch.device, share: tuple[int, int], say: Callable[[str], None]) -> None:
    """Runs a share of all calls, including calibration's, once on each timed backend, to compile their kernels."""
    todo = [(task.backend, task.call) for task in calibrate.plan(device)]
    todo += [(name, call) for _, call in calls(device) for name in _worth_timing(explain(call))[0]]
    groups: dict[tuple, list[tuple[str, OpCall]]] = {}
    for name, call in todo:
        if not call.capturing and name != "reference":
            groups.setdefault(_kernels(name, call), []).append((name, call))
    first, step = share
    for name, call in itertools.chain(*sorted(groups.values(), key=len)[first::step]):
        try:
            run_once(name, call)
        except Exception as error:
            say(f"{name} {describe(as_json(call))}: {type(error).__name__}: {error}"[:300])
        free_memory()


def _kernels(name: str, call: OpCall) -> tuple:
    """Returns a key of a call's kernels. One process runs all calls with a key, so one or two compile each kernel."""
    dims = call.dims
    sizes = [dims.get(dim) for dim in ("K", "V", "columns")]
    few = [min(dims.get(dim, 0), 300).bit_length() for dim in ("Tq", "rows")]
    tokens = min(dims["T"] // max(dims["N"], 1), 300).bit_length() if "T" in dims else 0
    heads = dims.get("Hq") == dims.get("H"), dims.get("Hv") == dims.get("H")
    return (name, call.op, *sizes, *few, tokens, *heads, call.dtype, call.gate_form, call.variable_length)


# ---- the file


def constants_in_use(
    device: torch.device, assumed: KnownDevice | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the constants of every cost model: value by backend, op and constant."""
    constants: dict[str, dict[str, dict[str, float]]] = {}
    call = functools.partial(OpCall, device=device, dtype=torch.float32, dims={}, assumed=assumed)
    for backend in registry.installed().values():
        if isinstance(backend.cost, CostModel):
            calls_of = {op: call(op=op) for op in backend.ops}
            constants[backend.name] = {op: dict(constants_for(backend, call)[0]) for op, call in calls_of.items()}
    return constants


def run(
    out: Path,
    device: torch.device,
    seconds: float,
    minutes: float,
    commit: str | None,
    say: Callable,
    passes: int = 1,
    again: int = 0,
) -> Path:
    """Measures calls that are not in the file yet, then all calls in further passes; begins none after `minutes`.

    Args:
        passes: number of passes over all calls.
        again: number of further passes over calls whose pick was too slow; a loaded host may have been the reason.
    """
    end = time.monotonic() + 60 * minutes
    head = header(device, commit)
    path = out / results.file_name("selection", device)
    rows = {key(row): row for row in earlier_rows(path, head)}

    def key_of(part: str, call: OpCall) -> str:
        return key({"part": part, **as_json(call)})

    def too_slow() -> Iterator[tuple[str, OpCall]]:
        yield from [(part, call) for part, call in calls(device) if not is_close(rows[key_of(part, call)])]

    missing = [(part, call) for part, call in calls(device) if key_of(part, call) not in rows]
    for part, call in itertools.chain(
        missing, *(calls(device) for _ in range(passes - 1)), *(too_slow() for _ in range(again))
    ):
        if time.monotonic() > end:
            say("out of time")
            break
        row = measure_row(part, call, seconds)
        name = key(row)
        rows[name] = quickest(rows[name], row) if name in rows else row
        write(path, head, list(rows.values()))
        say(describe(rows[name]))
    return path


def pick_again(path: Path) -> Path:
    """Makes new picks for the times of a file, after a change of cost models or constants.

    Raises:
        KeyError: the file was measured on a GPU that is not one of `KNOWN_DEVICES`.
    """
    report = json.loads(path.read_text())
    rows, assumed = report.pop("rows"), None if path.stem == "selection-cpu" else KNOWN_DEVICES[report["device"]]
    device = torch.device("cuda" if assumed else "cpu")
    calls_of = {key({"part": part, **as_json(c)}): dataclasses.replace(c, assumed=assumed) for part, c in calls(device)}
    rows = [judged({**row, **_picked(explain(calls_of[key(row)]))}) for row in rows]
    write(path, {**report, "constants": constants_in_use(device, assumed)}, rows)
    return path


def header(device: torch.device, commit: str | None) -> Row:
    """Returns the conditions of the times, and the date."""
    now = results.conditions(device, commit)
    return {**now, "threads": torch.get_num_threads(), "constants": constants_in_use(device)}


def earlier_rows(path: Path, head: Row) -> list[Row]:
    """Returns the rows of an earlier run under the same conditions."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    same = all(before.get(name) == head[name] for name in head if name != "date")
    return before["rows"] if same else []


def write(path: Path, head: Row, rows: Sequence[Row], summed: dict[str, Row] | None = None) -> None:
    """Writes the rows, after a summary of all of them."""
    write_json(path, {**head, "summary": summed or summary(rows), "rows": rows})


def key(row: Row) -> str:
    """Returns a key that identifies a row; sizes that an older file lacks have their defaults."""
    dims = ABSTRACT_OPS[row["op"]].dims(row["dims"])
    facts = [row.get(name) for name in ("packed", "graph", "form", "dtype")]
    return json.dumps([row["part"], row["op"], dims, *facts], sort_keys=True)


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Returns, for each part, the number of calls, the share of picks that count as right, and the worst ratio."""
    summaries = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        ratios = [math.inf if row["ratio"] is None else row["ratio"] for row in rows if row["part"] == part]
        shapes = {json.dumps(row["dims"]) for row in rows if row["part"] == part}
        within = closeness(part)
        close = sum(ratio <= within for ratio in ratios) / len(ratios)
        numbers = {"within": within, "close": close, "worst": max(ratios)}
        summaries[part] = {"shapes": len(shapes), "calls": len(ratios), **numbers}
    return summaries


def closeness(part: str) -> float:
    """Returns the ratio to the fastest time up to which a pick of a part counts as right."""
    return CLOSE_UNKNOWN if part.startswith(("packed", "forms")) else CLOSE


def is_close(row: Row) -> bool:
    """Returns whether the pick of a row counts as right."""
    return row["ratio"] is not None and row["ratio"] <= closeness(row.get("part", ""))


def describe(row: Row) -> str:
    """Returns a row in one line."""
    dims = " ".join(f"{name}{size}" for name, size in row["dims"].items() if name not in ("Hq", "Hv"))
    flags = " ".join(flag for flag in ("packed", "graph") if row.get(flag))
    flags = " ".join(filter(None, (row.get("form"), row.get("dtype"), flags)))
    line = f"{row.get('part', '')}: {row['op']} {dims} {flags}"
    if "measured" not in row:
        return line
    names = sorted(row["predicted"], key=lambda name: row["measured"].get(name, math.inf))
    times = ", ".join(
        f"{name} {results.time_text(row['measured'].get(name))} ({results.time_text(row['predicted'][name])})"
        for name in names
    )
    wrong = "" if is_close(row) else f"  <- {row['pick']}: {row['ratio']}"
    return f"{line}: {times}{wrong}"


def in_words(part: str, summed: Row) -> str:
    """Returns the summary of a part in a sentence."""
    within = f"{summed['within'] - 1:.0%}"
    return (
        f"{part}: {summed['calls']} calls of {summed['shapes']} shapes; the pick is within {within} of the "
        f"fastest on {summed['close']:.1%}, and {summed['worst']:.2f} times as slow at worst"
    )
