"""Is the backend that `auto` picks the fastest? Times of every backend that can run each call of a grid.

`evidence.py selection` runs it.

The shapes of the grid are drawn at random, from a fixed seed, over B*H from 1 to 512 and T from 1 to 131,072 (smaller
on a CPU); `gla calibrate` uses none of them. Backends that predict no time, which `auto` puts behind the others, are
left out. `auto` knows a bound of the lengths of packed sequences there. The file holds more parts: on a GPU the
backward of some of these shapes, with checkpoints, as training runs it, and packed sequences of several kinds of
lengths, of which `auto` knows nothing; other ops; the lengths of the crossover that benchmarks/crossover.py draws. What
an earlier run has measured is not measured again, unless the device, a version, the commit or a constant has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from gla_core.bench import calibrate, measure, results
from gla_core.bench.calls import calls_for, run_once
from gla_core.dispatch import registry
from gla_core.dispatch.backend import CostModel, KnownDevice, OpCall
from gla_core.dispatch.calibration import KNOWN_DEVICES, constants_for
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import Explanation, explain_call
from gla_core.files import write_json
from gla_core.ops import ABSTRACT_OPS
from gla_core.ops.chunk_gla import CHUNK
from gla_core.workloads.inputs import random_arguments

CLOSE = 1.05
"""A pick that takes up to so many times as long as the fastest counts as right."""
CLOSE_UNKNOWN = 1.15
"""The same where the lengths of packed sequences are not known."""
HOPELESS = 20
"""A backend that is predicted to take so many times as long as the best, and `LONG`, is left out."""
LONG = 10e-3
ROUNDS = 3
"""The backends are timed in turns so many times: a clock that drifts then meets them all."""
WIDTHS = (*[(128, 128)] * 4, *[(64, 64)] * 2, (64, 128), (128, 64), (96, 192), (128, 256), (256, 128), (256, 256))
GRID = 72
BACKWARDS = 36
LENGTHS = ("equal", "uniform", "log-uniform", "one giant", "single tokens")
OF_EACH = 20

Row = dict[str, Any]
Shape = tuple[int, int, int, int, int, int | None]


# ---- what is measured


def calls(device: torch.device) -> Iterator[tuple[str, OpCall]]:
    """Every call with its part, such as 'grid' or 'packed, equal'. Small ones come in a CUDA graph as well."""
    cuda = device.type == "cuda"
    for B, H, T, K, V, N in shapes(cuda):
        call = chunk_call(device, B, H, T, K, V, N)
        yield "grid", call
        if cuda and B * H * T <= 2**17:
            yield "grid", dataclasses.replace(call, capturing=True)
    for B, H, T, K, V, N in shapes(cuda)[:BACKWARDS] if cuda else ():
        yield "backward", backward_of(chunk_call(device, B, H, T, K, V, N))
    yield from packed_calls(device) if cuda else ()
    for call in other_calls(device):
        yield "other ops", call
        if cuda and call.op == "recurrent_gla_step":
            yield "other ops", dataclasses.replace(call, capturing=True)
    for heads in (1, 4, 16, 64) if cuda else (1, 4, 16):  # 128 heads fill a GPU: both backends run the same kernel
        for T in (2**n for n in (range(8, 18) if cuda else range(4, 12))):
            if heads * T <= (2**22 if cuda else 2**14):
                yield "crossover", chunk_call(device, max(1, heads // 16), min(heads, 16), T, 128, 128)


def shapes(cuda: bool) -> list[Shape]:
    """B, H, T, K, V of the grid, and the number of packed sequences, None where they are not packed."""
    most_heads, most_tokens, most = (512, 2**17, 2**22) if cuda else (64, 2**12, 2**14)  # together: heads x tokens
    random = Random(5)

    def between(low: float, high: float) -> int:
        return round(low * (high / low) ** random.random())

    corners = ((2, most_tokens, 128), (most_heads, 1, 128), (1, 1, 96), (1, most_tokens - 1, 64))
    found: list[Shape] = [(1, H, T, K, K, None) for H, T, K in corners]
    while len(found) < GRID:
        heads, T = between(1, most_heads), between(16, most_tokens)
        K, V = random.choice(WIDTHS)
        H = min(heads, random.choice((2, 4, 8, 16, 32)))
        if not T & (T - 1) or heads * T * (K + V) / 256 > most:
            continue
        packed = random.random() < 0.25 and T >= 64
        N = between(2, min(128, T // 16)) if packed else None
        shape = (1 if packed else max(1, heads // H), H, T, K, V, N)
        if shape not in found:
            found.append(shape)
    return found


def chunk_call(device: torch.device, B: int, H: int, T: int, K: int, V: int, N: int | None = None) -> OpCall:
    """chunk_gla_fwd as models run it: bfloat16 with float32 gates, on a CPU float32; N packed sequences if given."""
    return OpCall(
        op="chunk_gla_fwd",
        device=device,
        dtype=_dtype(device),
        dims={"B": B, "T": T, "H": H, "Hq": H, "K": K, "V": V, "N": N or B},
        gate_dtype=torch.float32,
        variable_length=N is not None,
        longest=None if N is None else min(T, -(-2 * T // N)),
    )


def backward_of(call: OpCall) -> OpCall:
    """Its chunk_gla_bwd, as training runs it."""
    return dataclasses.replace(call, op="chunk_gla_bwd", scalars={"checkpoint_every": CHUNK})


def packed_calls(device: torch.device) -> Iterator[tuple[str, OpCall]]:
    """Calls of packed sequences whose lengths nobody has said, forward and, of half of them, backward."""
    random = Random(6)
    for kind in LENGTHS:
        for i in range(OF_EACH):
            N, T = round(2 * 256 ** random.random()), round(1000 * 100 ** random.random())
            H, K, V = random.choice((4, 8, 16, 32)), random.choice((64, 128, 256)), random.choice((64, 128, 256))
            T = max(N, min(T, 2**29 // (H * (K + V))))
            call = dataclasses.replace(chunk_call(device, 1, H, T, K, V, N), longest=None)
            yield f"packed, {kind}", call
            if i % 2:
                yield f"packed, {kind}", backward_of(call)


def lengths(kind: str, T: int, N: int) -> list[int]:
    """Tokens of N sequences, T in all, each of at least one; the same for the same arguments."""
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
    """Calls of the other ops."""
    cuda = device.type == "cuda"
    call = functools.partial(OpCall, device=device, dtype=_dtype(device))
    states: Any = {"gate_dtype": torch.float32, "state_dtype": torch.float32}
    for B in (1, 3, 24, 100, 500) if cuda else (1, 3, 24):
        yield call(op="recurrent_gla_step", dims={"B": B, "H": 12, "Hq": 12, "K": 128, "V": 128, "P": B}, **states)
    many = ((1, 1000), (3, 100_000), (1, 5_000_000), (6, 10_000_000), (64, 200_000), (300, 30_000), (5000, 3000))
    few = ((1, 1000), (3, 100_000), (64, 3000), (700, 100))
    for rows, columns in many if cuda else few:
        yield call(op="online_softmax", dims={"rows": rows, "columns": columns})
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
        dims = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "Hq": H * G, "K": 128, "V": 128}
        yield call(op="softmax_attention", dims=dims)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# ---- measuring


def measure_row(part: str, call: OpCall, seconds: float) -> Row:
    """Time every backend that can run the call; `seconds` of timed calls each."""
    explanation = explain(call)
    times, left_out = time_backends(
        call, arguments_of(call, _lengths_of(part, call)), *_worth_timing(explanation), seconds
    )
    measured = {name: rounded(time) for name, time in times.items()}
    return judged({"part": part, **as_json(call), **_picked(explanation), "measured": measured, "left_out": left_out})


def _picked(explanation: Explanation) -> Row:
    predicted = {c.name: rounded(c.seconds) for c in explanation.candidates if c.refusal is None}
    return {"predicted": predicted, "pick": explanation.winner}


def _lengths_of(part: str, call: OpCall) -> list[int] | None:
    """Tokens of the sequences of a packed call whose part names a kind of lengths."""
    _, _, kind = part.partition(", ")
    return lengths(kind, call.dims["T"], call.dims["N"]) if kind else None


def arguments_of(call: OpCall, tokens: Sequence[int] | None) -> tuple[Any, ...]:
    """Random arguments, of packed sequences with so many tokens each where that is said."""
    arguments = random_arguments(call)
    if tokens is None:
        return arguments
    at = ABSTRACT_OPS[call.op].parameters.index("cu_seqlens")
    ends = torch.tensor([0, *tokens]).cumsum(0)
    return (*arguments[:at], ends.to(arguments[at]), *arguments[at + 1 :])


def judged(row: Row) -> Row:
    """The row with the fastest backend, and by how much the pick is slower."""
    times = row["measured"]
    best, chosen = min(times.values(), default=math.nan), times.get(row["pick"])
    fastest = min(times, key=times.__getitem__, default=None)
    return {**row, "fastest": fastest, "ratio": rounded(chosen and chosen / best)}


def quickest(row: Row, again: Row) -> Row:
    """Two measurements of one call as one: whatever else a machine does for a while makes times longer."""
    times = [found["measured"] for found in (row, again)]
    both = {name: min(found[name] for found in times if name in found) for name in {**times[0], **times[1]}}
    return judged({**again, "measured": both})


def rounded(x: float | None) -> float | None:
    return x and float(f"{x:.4g}")


def explain(call: OpCall) -> Explanation:
    return explain_call(call, current_request("auto"))


def as_json(call: OpCall) -> Row:
    """The call, fit for a file."""
    flags = {"packed": call.variable_length, "graph": call.capturing}
    return {"op": call.op, "dims": dict(call.dims), **{name: True for name, flag in flags.items() if flag}}


def _worth_timing(explanation: Explanation) -> tuple[list[str], dict[str, str]]:
    """Names of the backends to time, and why others are left out."""
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
    """Seconds of each backend that ran, in the quickest of its rounds, and why the others did not.

    Rounds are medians, by turns, and each begins with another backend: what runs after a slow one takes longer on the
    host. Whatever else a machine does for a while makes times longer, never shorter.
    """
    timer = measure.time_graph if call.capturing else measure.time_calls
    rounds = 1 if call.capturing else ROUNDS
    calls_of: dict[str, list] = {}
    found: dict[str, list[float]] = {}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            if name in left_out:
                continue
            try:
                if name not in calls_of:
                    calls_of[name] = calls_for(name, call, arguments)
                timing = timer(calls_of[name], call.device, seconds / rounds)
                found.setdefault(name, []).append(timing.seconds)
            except Exception as error:  # out of memory, a kernel that cannot be built
                left_out = {**left_out, name: f"{type(error).__name__}: {error}"[:200]}
    del arguments, calls_of
    _free(call.device)
    return {name: min(times) for name, times in found.items() if name not in left_out}, left_out


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_share(device: torch.device, share: tuple[int, int], say: Callable[[str], None]) -> None:
    """Run a share of all calls once, calibration's as well, by each backend timed: for what a first use compiles."""
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
        _free(device)


def _kernels(name: str, call: OpCall) -> tuple:
    """Calls that differ in this share few kernels, so that each is compiled by one process, or two."""
    dims = call.dims
    sizes = [dims.get(dim) for dim in ("K", "V", "columns")]
    few = [min(dims.get(dim, 0), 300).bit_length() for dim in ("Tq", "rows")]
    tokens = min(dims["T"] // max(dims["N"], 1), 300).bit_length() if "T" in dims else 0
    return (name, call.op, *sizes, *few, tokens, dims.get("Hq") == dims.get("H"), call.dtype, call.variable_length)


# ---- the file


def constants_in_use(
    device: torch.device, assumed: KnownDevice | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Of every cost model: backend to op to constant to value."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    call = functools.partial(OpCall, device=device, dtype=torch.float32, dims={}, assumed=assumed)
    for backend in registry.installed().values():
        if isinstance(backend.cost, CostModel):
            calls_of = {op: call(op=op) for op in backend.ops}
            found[backend.name] = {op: dict(constants_for(backend, call)[0]) for op, call in calls_of.items()}
    return found


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
    """Measures the calls that are not in the file yet, then all calls again. Begins no measurement after `minutes`.

    Args:
        passes: over all calls.
        again: further passes, over the calls alone whose pick took too long: a loaded host may have been the reason.
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
    """Make the picks of a file anew, of the times that it holds: cost models or constants have changed since.

    Raises:
        KeyError: it was measured on a GPU that is not one of `KNOWN_DEVICES`.
    """
    found = json.loads(path.read_text())
    rows, assumed = found.pop("rows"), None if path.stem == "selection-cpu" else KNOWN_DEVICES[found["device"]]
    device = torch.device("cuda" if assumed else "cpu")
    calls_of = {key({"part": part, **as_json(c)}): dataclasses.replace(c, assumed=assumed) for part, c in calls(device)}
    rows = [judged({**row, **_picked(explain(calls_of[key(row)]))}) for row in rows]
    write(path, {**found, "constants": constants_in_use(device, assumed)}, rows)
    return path


def header(device: torch.device, commit: str | None) -> Row:
    """What the times depend on, and the date."""
    now = results.conditions(device, commit)
    return {**now, "threads": torch.get_num_threads(), "constants": constants_in_use(device)}


def earlier_rows(path: Path, head: Row) -> list[Row]:
    """The rows of an earlier run like this one."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    same = all(before.get(name) == head[name] for name in head if name != "date")
    return before["rows"] if same else []


def write(path: Path, head: Row, rows: Sequence[Row], summed: dict[str, Row] | None = None) -> None:
    """The rows after the summary of all."""
    write_json(path, {**head, "summary": summed or summary(rows), "rows": rows})


def key(row: Row) -> str:
    """What tells a row from all others."""
    return json.dumps([row["part"], row["op"], row["dims"], row.get("packed"), row.get("graph")], sort_keys=True)


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each part: number of calls, share of picks within so many times the fastest time, and the worst ratio."""
    found = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        ratios = [math.inf if row["ratio"] is None else row["ratio"] for row in rows if row["part"] == part]
        shapes = {json.dumps(row["dims"]) for row in rows if row["part"] == part}
        within = closeness(part)
        close = sum(ratio <= within for ratio in ratios) / len(ratios)
        numbers = {"within": within, "close": close, "worst": max(ratios)}
        found[part] = {"shapes": len(shapes), "calls": len(ratios), **numbers}
    return found


def closeness(part: str) -> float:
    """How many times as long as the fastest a pick of a part may take and counts as right."""
    return CLOSE_UNKNOWN if part.startswith("packed") else CLOSE


def is_close(row: Row) -> bool:
    """Returns whether the pick of a row counts as right."""
    return row["ratio"] is not None and row["ratio"] <= closeness(row.get("part", ""))


def describe(row: Row) -> str:
    """One line."""
    dims = " ".join(f"{name}{size}" for name, size in row["dims"].items() if name != "Hq")
    flags = " ".join(flag for flag in ("packed", "graph") if row.get(flag))
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


def in_words(part: str, found: Row) -> str:
    """The summary of a part in a sentence."""
    within = f"{found['within'] - 1:.0%}"
    return (
        f"{part}: {found['calls']} calls of {found['shapes']} shapes; the pick is within {within} of the "
        f"fastest on {found['close']:.1%}, and {found['worst']:.2f} times as slow at worst"
    )
