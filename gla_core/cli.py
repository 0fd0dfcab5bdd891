"""The command `gla`: what is installed, who would run a call and why, what is wrong, and a demonstration.

Exit codes: 0 all is well; 1 bad news (nobody can run the call, a plugin is broken, the demo fell short); 2 the
question was wrong; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    print(f"gla needs the package {missing.name!r}: pip install 'gla-core[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

import torch

import gla_core as gla
from gla_core.dispatch.backend import OpCall
from gla_core.dispatch.errors import nearest
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.doctor import backend_row, examine, message, request_in_force

SHAPES: Mapping[str, tuple[str, ...]] = {
    "chunk_gla_fwd": ("B", "T", "H", "K", "V"),
    "chunk_gla_bwd": ("B", "T", "H", "K", "V"),
    "recurrent_gla_step": ("B", "H", "K", "V"),
    "softmax_attention": ("B", "T", "H", "K", "V"),
    "online_softmax": ("ROWS", "COLUMNS"),
}
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def main() -> None:
    """Run the command line; the entry point `gla`."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app(prog_name="gla")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gla_core {gla.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


@app.callback(epilog="Example: gla demo")
def _gla(version: Version = False) -> None:
    """Gated Linear Attention: its ops, and the backends that run them."""


@app.command(epilog="Example: gla backends --json")
def backends(as_json: Json = False) -> None:
    """List the backends that are installed, and the plugins that failed to load.

    Exits with 1 if a plugin failed to load.
    """
    with _usage_errors():
        rows = [backend_row(info) for info in gla.backends()]
    if as_json:
        _print_json(rows)
    else:
        _print_table(rows)
    raise typer.Exit(int(any(row["load error"] for row in rows)))


@app.command(
    epilog="Examples:\n\ngla explain chunk_gla_fwd --shape 8,4096,16,128,128 --dtype bfloat16 --device cuda\n\n"
    "gla explain chunk_gla_bwd --shape 1,8192,4,64,64 --query-heads 16 --varlen 12\n\n"
    "gla explain recurrent_gla_step --shape 64,16,128,128 --backend reference\n\n"
    "gla explain online_softmax --shape 1024,50257"
)
def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    shape: Annotated[str, typer.Option(help="Sizes separated by commas, as above.")],
    query_heads: Annotated[int | None, typer.Option(help="Query heads, a multiple of H; H by default.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")] = "auto",
    varlen: Annotated[int | None, typer.Option(help="Number of sequences packed along T; B is then 1.")] = None,
    backend: Annotated[str | None, typer.Option(help="A request, such as reference, or a,b, or op=a;*=auto.")] = None,
    as_json: Json = False,
) -> None:
    """Say which backend would run a call of this size, which would not, and why. Runs nothing.

    The sizes are B,T,H,K,V for chunk_gla_fwd, chunk_gla_bwd and softmax_attention (batch, tokens, heads, key width,
    value width), B,H,K,V for recurrent_gla_step, ROWS,COLUMNS for online_softmax. Gates and states are float32
    (float64 with float64).

    Exits with 0 if some backend can run it, 1 if none can, 2 for an unknown op or backend.
    """
    with _usage_errors():
        call = describe_call(op, shape, query_heads, dtype, device, varlen)
        explanation = explain_call(call, current_request(backend))
    if as_json:
        _print_json(_explanation_fields(explanation))
    else:
        typer.echo(str(explanation))
    raise typer.Exit(int(explanation.winner is None))


@app.command(epilog="Example: GLA_BACKEND=reference gla doctor")
def doctor(as_json: Json = False) -> None:
    """Examine this installation: versions, devices, GLA_* variables, backends, plugins that failed to load.

    Exits with 1 if anything is wrong.
    """
    report = examine()
    if as_json:
        _print_json(report)
    else:
        _print_report(report)
    raise typer.Exit(int(bool(report["problems"])))


@app.command(epilog="Examples:\n\ngla bench --op chunk_gla --json bench.json\n\ngla bench --tag decode --device cuda")
def bench(
    op: Annotated[str | None, typer.Option(help="A public op, such as chunk_gla; all by default.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="A request; repeat for several; all by default.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only workloads with this tag, such as train.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="Only the workload of this name, or op/name.")] = None,
    direction: Annotated[
        list[str] | None,
        typer.Option(help="forward, forward+backward, step, step_graph (these by default), forward_graph, host, ..."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw PNGs into this folder; needs matplotlib.")] = None,
    baselines: Annotated[bool, typer.Option(help="Also time what to beat: a loop, PyTorch, FLA.")] = True,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Of timed calls per measurement.")] = None,
) -> None:
    """Time the backends over named workloads, beside baselines and the memory floor.

    Without --tag and --workload: small workloads on a CPU, in about a minute; those of models on a GPU. GB/s count the
    bytes that must be moved at least; "of floor" compares with a copy on the same device; "x fla" above 1 is faster.
    """
    from gla_core.bench.run import Options, run_bench  # the other commands do not need it

    with _usage_errors():
        options = Options(
            device=_device_here(device),
            op=op,
            backends=backend or (),
            tags=tag or (),
            names=workload or (),
            directions=direction or (),
            baselines=baselines,
            seconds=seconds,
            json=json_file,
            plot=plot,
        )
        run_bench(options, _console())


@app.command(epilog='Example: gla demo --seconds 60 --prompt "class "')
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Train for this many steps instead of by time.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Train for this long; 100 by default, 40 on a GPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the batches and the text generated.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")] = "auto",
    prompt: Annotated[str, typer.Option(help="What the generated text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option(min=0, help="Bytes to generate.")] = 400,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest byte.")] = 0.7,
) -> None:
    """Train a small GLA language model on Python's own source files, then generate text from it.

    Takes about two minutes on two CPU cores, and uses a GPU where there is one. Ctrl-C ends the training and goes on
    with what was learned so far; a second one ends the program.

    Exits with 1 if the model does not beat a bigram model or if chunked and recurrent evaluation disagree.
    """
    from gla_core.demo.run import Options, run_demo  # the other commands do not need it

    with _usage_errors():
        place = _device_here(device)
        request_in_force()  # a typo in GLA_BACKEND shows now, not after the text has been read
    options = Options(place, steps, seconds, seed, prompt, tokens, temperature)
    try:
        good = run_demo(options, _console())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (gla.NoBackendError, FileNotFoundError) as error:
        typer.echo(f"gla demo: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(int(not good))


@app.command(epilog="Example: gla conformance reference --report report.json -k 'gradients and float32'")
def conformance(
    name: Annotated[str, typer.Argument(help="The backend to judge.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cpu unless the backend does not run there.")] = None,
    report: Annotated[str | None, typer.Option(help="Write a JSON report to this file.")] = None,
    select: Annotated[str | None, typer.Option("-k", help="Names of tests, workloads, dtypes, as pytest's -k.")] = None,
    commit: Annotated[str | None, typer.Option(help="Source revision to note in the report.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line per case.")] = False,
) -> None:
    """Prove a backend right: values, gradients, layouts, memory and refusals of every op that it declares.

    Exits with 0 if no case failed, 1 if some did, 2 for an unknown backend, a wrong device or an empty selection.
    """
    try:
        from gla_core.conformance.run import run
    except ModuleNotFoundError as missing:
        message = f"gla conformance needs the package {missing.name!r}: pip install 'gla-core[conformance]'"
        typer.echo(message, err=True)
        raise typer.Exit(2) from None
    with _usage_errors():
        code = run(name, device, report, select, commit, verbose=verbose)
    raise typer.Exit(code)


# ---- explain


def describe_call(op: str, shape: str, query_heads: int | None, dtype: str, device: str, varlen: int | None) -> OpCall:
    """The call that the numbers of a command line describe. Raises ValueError or UnknownOpError for bad ones."""
    if op not in SHAPES:
        raise gla.UnknownOpError(f"unknown op {op!r}{nearest(op, SHAPES)} (there are {', '.join(SHAPES)})")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)} (there are {', '.join(DTYPES)})")
    sizes = _sizes(op, shape)
    if query_heads is not None and "H" not in sizes:
        raise ValueError(f"--query-heads does not go with {op}, which has no heads")
    if varlen is not None and not op.startswith("chunk_gla"):
        raise ValueError(f"--varlen does not go with {op}; only chunk_gla_fwd and chunk_gla_bwd take packed sequences")
    if varlen is not None and (varlen < 0 or sizes["B"] != 1):
        raise ValueError(f"--varlen {varlen} packs sequences along T: expected B = 1 and not B = {sizes['B']}")
    wide = torch.float64 if dtype == "float64" else torch.float32
    return OpCall(
        op=op,
        device=_device(device),
        dtype=DTYPES[dtype],
        dims=_dims(op, sizes, query_heads, varlen),
        gate_dtype=wide if "gla" in op else None,
        state_dtype=wide if op == "recurrent_gla_step" else None,
        variable_length=varlen is not None,
    )


def _sizes(op: str, shape: str) -> dict[str, int]:
    names = SHAPES[op]
    parts = shape.split(",")
    if len(parts) != len(names) or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"--shape {shape!r} has {len(parts)} values; {op} expects {len(names)} whole numbers: {','.join(names)}"
        )
    sizes = dict(zip(names, map(int, parts), strict=True))
    for name in ("H", "K", "V"):
        if sizes.get(name) == 0:
            raise ValueError(f"--shape {shape!r}: {name} is 0; expected at least 1")
    return sizes


def _dims(op: str, sizes: dict[str, int], query_heads: int | None, varlen: int | None) -> dict[str, int]:
    """The sizes by the names of `OpCall.dims`."""
    if op == "online_softmax":
        return {"rows": sizes["ROWS"], "columns": sizes["COLUMNS"]}
    B, H, K, V = (sizes[name] for name in "BHKV")
    Hq = H if query_heads is None else query_heads
    if Hq < 1 or Hq % H != 0:
        raise ValueError(f"--query-heads is {Hq}; expected a multiple of H = {H}")
    if op == "recurrent_gla_step":
        return {"B": B, "H": H, "Hq": Hq, "K": K, "V": V, "P": B}
    if op == "softmax_attention":
        return {"B": B, "Tq": sizes["T"], "Tk": sizes["T"], "H": H, "Hq": Hq, "K": K, "V": V}
    return {"B": B, "T": sizes["T"], "H": H, "Hq": Hq, "K": K, "V": V, "N": B if varlen is None else varlen}


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:1")
    if kind == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available() and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", int(index or 0))


def _device_here(name: str) -> torch.device:
    """A device that can be used, and not only spoken of."""
    place = _device(name)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no CUDA device here; leave out --device")
    return place


def _explanation_fields(explanation: gla.Explanation) -> dict[str, Any]:
    call = explanation.call
    return {
        "op": call.op,
        "dims": dict(call.dims),
        "dtype": str(call.dtype).removeprefix("torch."),
        "device": str(call.device),
        "variable_length": call.variable_length,
        "request": explanation.request,
        "source": explanation.source,
        "candidates": [{"name": c.name, "seconds": c.seconds, "refusal": c.refusal} for c in explanation.candidates],
        "winner": explanation.winner,
        "why": explanation.why,
    }


# ---- printing


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report what is wrong with the question, as a usage error: exit code 2."""
    try:
        yield
    except (ValueError, LookupError) as error:
        raise typer.BadParameter(message(error)) from None


def _console() -> Console:
    return Console(markup=False, highlight=False)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows of the same keys; a column that nobody fills is left out."""
    if not rows:
        return
    columns = [name for name in rows[0] if any(row[name] not in (None, []) for row in rows)]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    _console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(value)
    return "-" if value is None else str(value)


def _print_report(report: dict[str, Any]) -> None:
    console = _console()
    console.print("  ".join(f"{name} {number}" for name, number in report["versions"].items()), soft_wrap=True)
    for device in report["devices"]:
        facts = ", ".join(f"{name} {value}" for name, value in device.items() if name != "device")
        console.print(f"{device['device']}: {facts}", soft_wrap=True)
    _print_table([{**row, "value": row["value"] or "unset"} for row in report["variables"]])
    _print_table(report["request"])
    _print_table([_without(row, "dtypes", "load error") for row in report["backends"]])
    for name, error in report["quarantine"].items():
        console.print(f"plugin {name!r} failed to load:\n{error}", soft_wrap=True)
    for problem in report["problems"]:
        console.print(f"problem: {problem}", style="red", soft_wrap=True)
    console.print("something is wrong" if report["problems"] else "all is well")


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


if __name__ == "__main__":
    main()
