"""The command `gla`: its subcommands with their arguments and help texts. What they do is in `gla_core`,
or in the plugin that a subcommand names.

They stand in a package of their own because `import gla_core` imports torch, for which `gla --help` must not wait. Each
subcommand imports what it needs when it runs.

Exit codes: 0 all is well; 1 bad news (nobody can run the call, a plugin is broken, the demo fell short, an op could not
be calibrated); 2 the question was wrong; 130 interrupted.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import rich  # noqa: F401 - what the subcommands print with
    import typer
except ModuleNotFoundError as missing:
    print(f"gla needs the package {missing.name!r}: pip install 'gla-core[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

# Without rich's boxes: they fold names, and cost time.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line; the entry point `gla`."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app(prog_name="gla")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"gla_core {version('gla-core')}")
        raise typer.Exit


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no finite number")
    return seconds


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")]
Seconds = Annotated[
    float | None, typer.Option(min=0.001, callback=_finite, help="Of timed calls per measurement, such as 0.1.")
]


@contextmanager
def _in_a_line(command: str) -> Iterator[None]:
    """End with a line and an exit code, not with a traceback, where the question is wrong or the user interrupts."""
    try:
        yield
    except (ValueError, LookupError) as error:
        _end(command, error, 2)
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as error:
        _end(command, error, 1)
    except KeyboardInterrupt:
        _end(command, KeyboardInterrupt("interrupted"), 130)


def _end(command: str, error: BaseException, code: int) -> NoReturn:
    from gla_core.terminal import message

    typer.echo(f"gla {command}: {message(error)}", err=True)
    raise typer.Exit(code) from None


@app.callback(epilog="Example: gla demo")
def _gla(version: Version = False) -> None:
    """Gated Linear Attention: its ops, and the backends that run them."""


@app.command(short_help="List what is installed, and what failed to load.", epilog="Example: gla backends --json")
def backends(as_json: Json = False) -> None:
    """List the backends that are installed, and the plugins that failed to load.

    Exits with 1 if a plugin failed to load.
    """
    with _in_a_line("backends"):
        from gla_core.cli.backends import backends

        good = backends(as_json)
    raise typer.Exit(int(not good))


@app.command(
    short_help="Say who would run a call, and why.",
    epilog="\b\nExamples:\n"
    "  gla explain chunk_gla --shape 8,4096,16,128,128\n"
    "  gla explain chunk_gla --shape 8,4096,16,128,128 --assume 'NVIDIA H200'\n"
    "  gla explain chunk_gla_bwd --shape 1,8192,4,64,64 --query-heads 16 --varlen 12\n"
    "  gla explain recurrent_gla_step --shape 64,16,128,128 --backend reference\n"
    "  gla explain online_softmax --shape 1024,50257 --measure",
)
def explain(
    op: Annotated[str, typer.Argument(help="An op, one of those above.")],
    shape: Annotated[str, typer.Option(help="Sizes separated by commas, as above.")],
    query_heads: Annotated[int | None, typer.Option(help="Query heads, a multiple of H; H by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "bfloat16",
    device: Device = "auto",
    varlen: Annotated[int | None, typer.Option(help="Number of sequences packed along T; B is then 1.")] = None,
    max_seqlen: Annotated[int | None, typer.Option(help="Tokens of the longest of them, where that is known.")] = None,
    backend: Annotated[str | None, typer.Option(help="A request, such as reference, or a,b, or op=a;*=auto.")] = None,
    assume: Annotated[
        str | None, typer.Option(help="A CUDA device to think of as being here, such as 'NVIDIA H200'.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time every backend that can run it, here.")] = False,
    as_json: Json = False,
) -> None:
    """Say which backend would run a call of this size, which would not, and why. Runs nothing, but with --measure.

    The sizes are B,T,H,K,V (batch, tokens, heads, key width, value width) for chunk_gla or chunk_gla_fwd, for
    chunk_gla_bwd, chunk_gla_summary and softmax_attention; B,H,K,V for recurrent_gla_step; ROWS,COLUMNS for
    online_softmax. Gates and states are float32 (float64 with float64).

    Exits with 0 if some backend can run it, 1 if none can, 2 for a wrong question.
    """
    with _in_a_line("explain"):
        from gla_core.cli.calls import describe_call
        from gla_core.cli.explain import explain

        call = describe_call(op, shape, query_heads, dtype, device, varlen, max_seqlen, assume)
        good = explain(call, backend, measure, as_json)
    raise typer.Exit(int(not good))


@app.command(short_help="Examine this installation.", epilog="Example: GLA_BACKEND=reference gla doctor")
def doctor(as_json: Json = False) -> None:
    """Examine this installation: versions, devices, GLA_* variables, backends, plugins that failed to load.

    Exits with 1 if anything is wrong.
    """
    from gla_core.cli.doctor import doctor

    raise typer.Exit(int(not doctor(as_json)))


@app.command(
    short_help="Time the backends.",
    epilog="\b\nExamples:\n  gla bench --op chunk_gla --json bench.json\n"
    "  gla bench --tag train --backend auto --backend reference\n"
    "  gla bench --tag decode --device cuda",
)
def bench(
    op: Annotated[str | None, typer.Option(help="An op, such as chunk_gla; all by default.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="A request, such as auto; repeat for several; each backend by default.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only workloads with this tag, such as train.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="Only the workload of this name, or op/name.")] = None,
    direction: Annotated[
        list[str] | None,
        typer.Option(help="forward, forward+backward, step, step_graph (these by default), forward_graph, host, ..."),
    ] = None,
    device: Device = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results into this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw PNGs into this folder; needs matplotlib.")] = None,
    baselines: Annotated[bool, typer.Option(help="Also time what to beat: a loop, PyTorch, FLA.")] = True,
    seconds: Seconds = None,
) -> None:
    """Time the backends over named workloads, beside baselines and the memory floor.

    Without --tag and --workload: small workloads on a CPU, in about a minute; those of models on a GPU. GB/s count the
    bytes that must be moved at least; "of floor" compares with a copy on the same device; "x fla" above 1 is faster. A
    row names the backends that ran: of `--backend auto`, those that it picked.

    Exits with 1 if no backend could be timed.
    """
    with _in_a_line("bench"):
        from gla_core.bench.run import Options, run_bench
        from gla_core.cli.calls import device_here, public_op
        from gla_core.terminal import new_console

        options = Options(
            device=device_here(device),
            op=op and public_op(op),
            backends=backend or (),
            tags=tag or (),
            names=workload or (),
            directions=direction or (),
            baselines=baselines,
            seconds=seconds,
            json=json_file,
            plot=plot,
        )
        good = run_bench(options, new_console())
    raise typer.Exit(int(not good))


@app.command(
    short_help="Measure what auto ranks by, on this device.",
    epilog="\b\nExamples:\n  gla calibrate\n  gla calibrate --backend mine --op online_softmax --json constants.json",
)
def calibrate(
    device: Device = "auto",
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend's name; repeat for several; all if none.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="An op; repeat for several; all if none.")] = None,
    seconds: Seconds = None,
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
    with _in_a_line("calibrate"):
        from gla_core.bench.calibrate import Options, run_calibrate
        from gla_core.cli.calls import abstract_ops, device_here
        from gla_core.terminal import new_console

        options = Options(
            device=device_here(device),
            backends=backend or (),
            ops=[abstract for name in op or () for abstract in abstract_ops(name)],
            seconds=seconds,
            json=json_file,
            dry_run=dry_run,
        )
        try:
            good = run_calibrate(options, new_console())
        except KeyboardInterrupt:
            _end("calibrate", KeyboardInterrupt("interrupted; nothing was stored"), 130)
    raise typer.Exit(int(not good))


@app.command(
    short_help="Train a small language model, generate from it.",
    epilog="Example: gla demo --seconds 60 --prompt 'class '",
)
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Train for this many steps instead of by time.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, callback=_finite, help="Train for this long; 100 by default, 40 on a GPU."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights, the batches and the text generated.")
    ] = 0,
    device: Device = "auto",
    prompt: Annotated[str, typer.Option(help="What the generated text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option(min=0, help="Bytes to generate.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="0 always takes the likeliest byte.")
    ] = 0.7,
) -> None:
    """Train a small GLA language model on Python's own source files, then generate text from it.

    Takes about two minutes on two CPU cores, and uses a GPU where there is one. Ctrl-C ends the training and goes on
    with what was learned so far; a second one ends the program.

    Exits with 1 if the model does not beat a bigram model or if chunked and recurrent evaluation disagree.
    """
    with _in_a_line("demo"):
        from gla_core import NoBackendError
        from gla_core.cli.calls import device_here
        from gla_core.cli.doctor import request_in_force
        from gla_core.demo.run import Options, run_demo
        from gla_core.terminal import new_console

        options = Options(device_here(device), steps, seconds, seed, prompt, tokens, temperature)
        request_in_force()  # a typo in GLA_BACKEND shows now, not after the text has been read
        try:
            good = run_demo(options, new_console())
        except NoBackendError as error:
            _end("demo", error, 1)
    raise typer.Exit(int(not good))


@app.command(
    short_help="Continue a text with a GLA model of transformers.",
    epilog="\b\nExamples:\n  gla generate my_model --prompt 'Once upon a time'\n"
    "  gla generate my_model --prompt 'Once' --temperature 0 --device cpu --dtype float32 > story.txt",
)
def generate(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder with a GLA model and its tokenizer.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="0 always takes the likeliest token.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, float16 or bfloat16; that of the weights by default.")
    ] = None,
) -> None:
    """Continue a text with a GLA model that transformers or flash-linear-attention has saved, as it is generated.

    Needs the package gla-transformers. Looks for nothing outside the folder.

    Exits with 2 if the folder has no such model or no tokenizer.
    """
    with _in_a_line("generate"):
        from gla_core.cli.calls import device_here, dtype_of

        try:
            from gla_transformers.text import Options, run_generate
        except ImportError as error:
            raise ValueError(f"needs the package gla-transformers ({error}): pip install gla-transformers") from None
        precision = None if dtype is None else dtype_of(dtype)
        run_generate(Options(folder, prompt, device_here(device), max_new_tokens, temperature, seed, precision))


@app.command(
    short_help="Prove a backend right.",
    epilog="\b\nExamples:\n  gla conformance reference --report report.json -k 'gradients and float32'\n"
    "  gla conformance reference -- -n 6 --tb=short",
)
def conformance(
    name: Annotated[str, typer.Argument(help="The backend to judge.")],
    pytest_options: Annotated[
        list[str] | None, typer.Argument(help="After --: options of pytest, such as -x, -n 6, --tb=short.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cpu unless the backend does not run there.")] = None,
    report: Annotated[
        str | None,
        typer.Option(help="Write a JSON summary to this file; every case, a line each, if it ends in .jsonl."),
    ] = None,
    select: Annotated[str | None, typer.Option("-k", help="Names of tests, workloads, dtypes, as pytest's -k.")] = None,
    commit: Annotated[str | None, typer.Option(help="Source revision to note in the report.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line per case.")] = False,
) -> None:
    """Prove a backend right: values, gradients, layouts, memory and refusals of every op that it declares.

    Exits with 0 if no case failed, 1 if some did, 2 for an unknown backend, a wrong device or an empty selection.
    """
    with _in_a_line("conformance"):
        try:
            from gla_core.conformance.run import run
        except ModuleNotFoundError as missing:
            raise ValueError(f"needs the package {missing.name!r}: pip install 'gla-core[conformance]'") from None
        code = run(name, device, report, select, commit, verbose=verbose, options=pytest_options or ())
    raise typer.Exit(code)
