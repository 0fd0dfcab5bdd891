"""The command `gla`: its subcommands with their arguments and help texts.

The code of the subcommands is in `gla_core`, or in the plugin that a subcommand names. Each subcommand imports the
modules that it needs when it runs, so that `gla --help` does not wait for torch.

Exit codes: 0 success; 1 failure (no backend can run the call, a plugin is broken, the demo fell short, an op could not
be calibrated, the output could not be written); 2 wrong usage (an unknown name, a value out of range, a missing
package); 130 interrupted.
"""

from __future__ import annotations

import io
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import rich  # noqa: F401 - the subcommands print with it
    import typer
except ModuleNotFoundError as missing:
    from gla_core.extras import how_to_install

    print(f"gla needs the package {missing.name!r}: {how_to_install('cli')}", file=sys.stderr)
    raise SystemExit(2) from None

# Without rich's boxes, which fold names and cost time.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Runs the command line; the entry point `gla`."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    _prepare_streams()
    code: str | int | None = 0
    try:
        app(prog_name="gla")
    except SystemExit as end:
        code = end.code
    except OSError as error:
        code = _unwritten(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        code = code or _unwritten(error)
    sys.exit(code)


def _unwritten(error: OSError) -> int:
    if not isinstance(error, BrokenPipeError):  # a reader may stop when it has seen enough
        print(f"gla: the output could not be written: {error.strerror}", file=sys.stderr)
    return 1


def _prepare_streams() -> None:
    """Makes printing safe.

    Streams that were closed (`gla ... >&-`) are connected to the null device. Characters that the encoding of standard
    output lacks become question marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each takes the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process runs
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"gla_core {version('gla-core')}")
        raise typer.Exit


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a finite number")
    return seconds


def _decoded(prompt: str) -> str:
    """Returns the prompt as text in UTF-8: in a locale such as C, Python leaves its bytes undecoded."""
    try:
        return prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise typer.BadParameter(f"expected text in UTF-8 ({error})") from None


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is cuda where there is one.")]
Seconds = Annotated[
    float | None, typer.Option(min=0.001, callback=_finite, help="Time to spend on each measurement, such as 0.1.")
]


@contextmanager
def _in_a_line(command: str) -> Iterator[None]:
    """Turns wrong usage, unwritable files and Ctrl-C into a message and an exit code instead of a traceback."""
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
    from gla_core.terminal import BAD, message, new_console, print_text

    print_text(new_console(stderr=True), f"gla {command}: {message(error)}", BAD)
    raise typer.Exit(code) from None


@app.callback(epilog="Example: gla demo")
def _gla(version: Version = False) -> None:
    """Gated Linear Attention: ops, and interchangeable backends that run them."""


@app.command(short_help="List the installed backends.", epilog="Example: gla backends --json")
def backends(as_json: Json = False) -> None:
    """List the installed backends: their ops, devices and dtypes, and the plugins that failed to load.

    Exits with 1 if a plugin failed to load.
    """
    with _in_a_line("backends"):
        from gla_core.cli.backends import backends

        good = backends(as_json)
    raise typer.Exit(int(not good))


@app.command(
    short_help="Show which backend would run a call, and why.",
    epilog="\b\nExamples:\n"
    "  gla explain chunk_gla --shape 8,4096,16,128,128\n"
    "  gla explain chunk_gla --shape 8,4096,16,128,128 --assume H200\n"
    "  gla explain chunk_gla --shape 8,4096,16,128,128 --assume H200 --path\n"
    "  gla explain chunk_gla_bwd --shape 1,8192,4,64,64 --query-heads 16 --varlen 12\n"
    "  gla explain chunk_gla --shape 1,8192,1,128,64 --value-heads 128 --gate head\n"
    "  gla explain recurrent_gla_step --shape 64,16,128,128 --backend reference\n"
    "  gla explain online_softmax --shape 1024,50257 --measure",
)
def explain(
    op: Annotated[str, typer.Argument(help="The op, such as chunk_gla.")],
    shape: Annotated[str, typer.Option(help="Sizes of the call, separated by commas.")],
    query_heads: Annotated[
        int | None, typer.Option(help="Number of query heads, a multiple of H (default: H).")
    ] = None,
    value_heads: Annotated[
        int | None, typer.Option(help="Number of value heads, a multiple of H (default: H).")
    ] = None,
    gate: Annotated[
        str | None, typer.Option(help="Form of the gates: key (the default), head, constant or none.")
    ] = None,
    gate_normalizer: Annotated[
        int | None, typer.Option(help="Gates are logits x: log sigmoid(x) divided by this number.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "bfloat16",
    device: Device = "auto",
    varlen: Annotated[int | None, typer.Option(help="Number of sequences packed along T; B must be 1.")] = None,
    max_seqlen: Annotated[
        int | None, typer.Option(help="Length of the longest packed sequence, or an upper bound.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="A backend's name, names to try in turn (a,b), or names by op (op=a;*=auto).")
    ] = None,
    assume: Annotated[
        str | None, typer.Option(help="Explain the call for this GPU, which need not be here: H100 or H200.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time every backend that can run the call.")] = False,
    path: Annotated[
        bool, typer.Option("--path", help="Show the functions that the call enters, and its launches, instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which backend would run a call of these sizes, and why the others would not.

    Nothing is run, except with --measure.

    --shape takes B,T,H,K,V (batch, tokens, heads, key width, value width) for chunk_gla_fwd (chunk_gla for short),
    chunk_gla_bwd, chunk_gla_summary, chunk_ssd_fwd, chunk_ssd_bwd, recurrent_gla_steps, chunk_delta_fwd,
    chunk_delta_bwd, chunk_delta_summary, chunk_delta_gradient_summary, recurrent_delta_steps, softmax_attention and
    softmax_attention_bwd; 1,T,H,K,V,N for N sequences of chunk_gla_pool and chunk_delta_pool; B,T,H,K,V,L for
    recurrent_gla_replay and recurrent_delta_replay with rings of L tokens; B,H,K,V for recurrent_gla_step,
    recurrent_gla_layer_step, recurrent_ssd_step and recurrent_delta_step; ROWS,COLUMNS for online_softmax and
    online_softmax_bwd. Gates and states are float32, or float64 with --dtype float64. Logits and beta have the dtype of
    q.

    Exits with 0 if a backend can run the call, 1 if none can, 2 if an argument is wrong.
    """
    with _in_a_line("explain"):
        from gla_core.cli.calls import describe_call
        from gla_core.cli.explain import explain

        gates = (gate, gate_normalizer)
        call = describe_call(op, shape, query_heads, dtype, device, varlen, max_seqlen, assume, value_heads, *gates)
        good = explain(call, backend, measure, as_json, path)
    raise typer.Exit(int(not good))


@app.command(short_help="Check this installation.", epilog="Example: GLA_BACKEND=reference gla doctor")
def doctor(as_json: Json = False) -> None:
    """Check this installation: versions, devices, GLA_* variables, backends, extras, plugins that failed to load.

    Exits with 1 if something is wrong. A backend that cannot run on this machine is shown, and is not an error.
    """
    with _in_a_line("doctor"):
        from gla_core.cli.doctor import doctor

        good = doctor(as_json)
    raise typer.Exit(int(not good))


@app.command(
    short_help="Time the backends.",
    epilog="\b\nExamples:\n  gla bench --op chunk_gla --json bench.json\n"
    "  gla bench --tag train --backend auto --backend reference\n"
    "  gla bench --tag decode --device cuda\n"
    "  gla bench --models --workload 'Falcon-H1 7B'",
)
def bench(
    op: Annotated[str | None, typer.Option(help="Only this op, such as chunk_gla.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A backend's name, or auto; repeat for several (default: every backend that has the op)."),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only workloads with this tag, such as train.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="Only the workload of this name, or op/name.")] = None,
    direction: Annotated[
        list[str] | None,
        typer.Option(help="forward, forward+backward, step, step_graph (these by default), forward_graph, host, ..."),
    ] = None,
    device: Device = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw pictures into this folder; needs matplotlib.")] = None,
    baselines: Annotated[
        bool, typer.Option(help="Also time a loop over tokens, PyTorch and flash-linear-attention (FLA).")
    ] = True,
    seconds: Seconds = None,
    models: Annotated[
        bool, typer.Option("--models", help="Time the calls of published models, beside FLA's and mamba_ssm's.")
    ] = False,
) -> None:
    """Time the backends on named workloads, beside baselines.

    Without --tag and --workload, a CPU runs small workloads, about a minute long, and a GPU the workloads of models.

    With --models, each call is the one that a layer of a published model makes: forward, forward and backward, and a
    step of 64 sequences. --workload then names models. "floors" is the time as a multiple of the larger of two times:
    that of moving each input and output once, and that of the matrix products. A CPU runs smaller calls of the same
    forms. Of the other options, --models takes --device, --seconds and --no-baselines.

    A time is the median of the timed calls; "spread" is the distance between their quartiles, as a share of the median.
    The columns "× loop", "× torch" and "× fla" say how many times as fast as that baseline a backend is. On a GPU,
    "GB/s" is the least number of bytes that the op can move, divided by the time, and "of floor" compares it with a
    copy on the same device. With --backend auto, a row names the backends that were chosen.

    Exits with 1 if no backend could be timed.
    """
    with _in_a_line("bench"):
        from gla_core.bench.run import Options, run_bench
        from gla_core.cli.calls import device_here, public_op
        from gla_core.terminal import new_console

        if models:
            from gla_core.bench.models import run_models

            refused = {
                "op": op,
                "backend": backend,
                "tag": tag,
                "direction": direction,
                "json": json_file,
                "plot": plot,
            }
            for name, value in refused.items():
                if value:
                    raise ValueError(f"--{name} does not go with --models")
            good = run_models(device_here(device), workload or (), baselines, seconds, new_console())
            raise typer.Exit(int(not good))
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
    short_help="Fit the cost models behind auto to this device.",
    epilog="\b\nExamples:\n  gla calibrate\n  gla calibrate --backend mine --op online_softmax --json constants.json",
)
def calibrate(
    device: Device = "auto",
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; repeat for several.")] = None,
    seconds: Seconds = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write the constants as backends ship them: NAME.json for one backend, or a folder."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, but store nothing.")] = False,
) -> None:
    """Measure the backends on this device and fit their cost models to it, so that auto chooses by times measured here.

    The constants that predict the measured times best are stored in the folder GLA_CACHE_DIR (by default
    $XDG_CACHE_HOME/gla_core or ~/.cache/gla_core). They are used until torch, triton, gla_core or the backend changes.

    Exits with 1 if an op could not be measured, 2 if there is nothing to measure, 130 if interrupted (nothing is stored
    then).
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
        float | None, typer.Option(min=0.1, callback=_finite, help="Train for this long (default: 100, on a GPU 40).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights, the batches and the text generated.")
    ] = 0,
    device: Device = "auto",
    prompt: Annotated[str, typer.Option(callback=_decoded, help="What the generated text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option(min=0, help="Bytes to generate.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="0 always takes the most likely byte.")
    ] = 0.7,
) -> None:
    """Train a small GLA language model on Python's own source files, then generate text from it.

    Takes about two minutes on two CPU cores, and uses a GPU if there is one. Ctrl-C ends the training early and goes on
    with the model as it is; a second Ctrl-C ends the program.

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
    short_help="Continue a text with a model of transformers.",
    epilog="\b\nExamples:\n  gla generate my_model --prompt 'Once upon a time'\n"
    "  gla generate my_model --prompt 'Once' --temperature 0 --device cpu --dtype float32 > story.txt",
)
def generate(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder with a model and its tokenizer.")],
    prompt: Annotated[str, typer.Option(callback=_decoded, help="What the text begins with.")],
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
    """Continue a text with a model that transformers or flash-linear-attention has saved.

    The model is a GLA or HGRN2 model, or one of transformers with Mamba-2, a delta rule or lightning attention.
    The text is printed as it is generated.

    Needs the package gla-transformers. Looks for nothing outside the folder.

    Exits with 2 if the folder has no such model or no tokenizer.
    """
    with _in_a_line("generate"):
        from gla_core.cli.calls import device_here, dtype_of

        try:
            from gla_transformers.text import Options, run_generate
        except ImportError as error:
            raise ValueError(
                f"needs the package gla-transformers ({error}): pip install ./plugins/gla_transformers in a clone of "
                "gla-core"
            ) from None
        precision = None if dtype is None else dtype_of(dtype)
        run_generate(Options(folder, prompt, device_here(device), max_new_tokens, temperature, seed, precision))


@app.command(
    short_help="Test a backend for correctness.",
    epilog="\b\nExamples:\n  gla conformance reference --report report.json -k 'gradients and float32'\n"
    "  gla conformance reference -- -n 6 --tb=short",
)
def conformance(
    name: Annotated[str, typer.Argument(help="The backend to test.")],
    pytest_options: Annotated[
        list[str] | None, typer.Argument(help="Options for pytest, after --: -x, -n 6, --tb=short.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda (default: cpu, or cuda if the backend cannot run on a CPU).")
    ] = None,
    report: Annotated[
        str | None, typer.Option(help="Write a JSON summary to this file; if it ends in .jsonl, a line for every case.")
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", help="Only matching tests, workloads and dtypes, as pytest's -k.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Source revision to record in the report.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for each case.")] = False,
) -> None:
    """Test a backend with the conformance kit: values, gradients, layouts, memory and refusals of each of its ops.

    Exits with 0 if no case failed, 1 if one did, 2 for an unknown backend, a wrong device or an empty selection.
    """
    with _in_a_line("conformance"):
        try:
            from gla_core.conformance.run import run
        except ModuleNotFoundError as missing:
            from gla_core.extras import how_to_install

            raise ValueError(f"needs the package {missing.name!r}: {how_to_install('conformance')}") from None
        code = run(name, device, report, select, commit, verbose=verbose, options=pytest_options or ())
    raise typer.Exit(code)


@app.command("new-backend", short_help="Start a backend of your own.", epilog="Example: gla new-backend my_softmax")
def new_backend(name: Annotated[str, typer.Argument(help="Name of the backend, its package and its folder.")]) -> None:
    """Copy the template of a backend into a new folder here, renamed: a complete package with one op.

    The folder's TUTORIAL.md shows how to install it, test it and make it yours.

    Exits with 2 if the folder exists, or the name is not usable or is taken.
    """
    with _in_a_line("new-backend"):
        from gla_tools.plugin_template import create, next_steps

        create(name, Path())
        typer.echo(next_steps(name))
