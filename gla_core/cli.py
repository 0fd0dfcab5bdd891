"""The command `gla`: what is installed, who would run a call and why, what is wrong, how fast, and a demonstration.

Exit codes: 0 all is well; 1 bad news (nobody can run the call, a plugin is broken, the demo fell short, an op could not
be calibrated); 2 the question was wrong; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
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

import gla_core as gla
from gla_core.cli_calls import DTYPES, SHAPES, describe_call, device_here
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.doctor import backend_row, examine, message, request_in_force

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
    "gla explain online_softmax --shape 1024,50257 --measure"
)
def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    shape: Annotated[str, typer.Option(help="Sizes separated by commas, as above.")],
    query_heads: Annotated[int | None, typer.Option(help="Query heads, a multiple of H; H by default.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")] = "auto",
    varlen: Annotated[int | None, typer.Option(help="Number of sequences packed along T; B is then 1.")] = None,
    backend: Annotated[str | None, typer.Option(help="A request, such as reference, or a,b, or op=a;*=auto.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time every backend that can run it, here.")] = False,
    as_json: Json = False,
) -> None:
    """Say which backend would run a call of this size, which would not, and why. Runs nothing, but with --measure.

    The sizes are B,T,H,K,V for chunk_gla_fwd, chunk_gla_bwd and softmax_attention (batch, tokens, heads, key width,
    value width), B,H,K,V for recurrent_gla_step, ROWS,COLUMNS for online_softmax. Gates and states are float32
    (float64 with float64).

    Exits with 0 if some backend can run it, 1 if none can, 2 for an unknown op or backend.
    """
    with _usage_errors():
        call = describe_call(op, shape, query_heads, dtype, device, varlen)
        explanation = explain_call(call, current_request(backend))
        if measure:
            explanation = _measured(explanation)
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
            device=device_here(device),
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


@app.command(
    epilog="Examples:\n\ngla calibrate\n\ngla calibrate --backend mine --op online_softmax --json constants.json"
)
def calibrate(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")] = "auto",
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend's name; repeat for several; all if none.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="An abstract op; repeat for several; all if none.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Of timed calls per measurement; 0.1 if none.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write constants as backends ship them: a file.json for one backend, or a folder."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, store nothing.")] = False,
) -> None:
    """Measure on this device what the backends' cost models predict, so that auto ranks by what is true here.

    The constants that predict the measured times best are stored in the folder GLA_CACHE_DIR (by default
    $XDG_CACHE_HOME/gla_core or ~/.cache/gla_core) and serve until torch, triton, gla_core or the backend changes.

    Exits with 1 if some op could not be measured, 2 if there is nothing to measure, 130 if interrupted: nothing is then
    stored.
    """
    from gla_core.bench.calibrate import Options, run_calibrate  # the other commands do not need it

    with _usage_errors():
        options = Options(
            device=device_here(device),
            backends=backend or (),
            ops=op or (),
            seconds=seconds,
            json=json_file,
            dry_run=dry_run,
        )
        try:
            good = run_calibrate(options, _console())
        except KeyboardInterrupt:
            typer.echo("gla calibrate: interrupted; nothing was stored", err=True)
            raise typer.Exit(130) from None
        except OSError as error:
            typer.echo(f"gla calibrate: {error}", err=True)
            raise typer.Exit(1) from None
    raise typer.Exit(int(not good))


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
        place = device_here(device)
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


def _measured(explanation: gla.Explanation) -> gla.Explanation:
    from gla_core.bench.calls import arguments_for
    from gla_core.explanation import with_measured_times

    device_here(str(explanation.call.device))
    return with_measured_times(explanation, arguments_for(explanation.call))


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
        "candidates": [dataclasses.asdict(candidate) for candidate in explanation.candidates],
        "winner": explanation.winner,
        "fastest": explanation.fastest,
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
    _print_table(report["calibration"])
    for name, error in report["quarantine"].items():
        console.print(f"plugin {name!r} failed to load:\n{error}", soft_wrap=True)
    for problem in report["problems"]:
        console.print(f"problem: {problem}", style="red", soft_wrap=True)
    console.print("something is wrong" if report["problems"] else "all is well")


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


if __name__ == "__main__":
    main()
