"""Train a GLA language model over bytes, on one device or, under torchrun, on several by FSDP2; see --help.

The model, the optimizer and the step are those of `gla_core.demo`. Beside this file: `processes.py` says what each
process has of the model and of a batch, `checkpoints.py` keeps the training, `speed.py` measures it.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import checkpoints
import processes
import torch
from checkpoints import Run, Training
from processes import Processes
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from speed import PROFILED, Speed
from torch.utils.checkpoint import checkpoint

from gla_core import NoBackendError
from gla_core.bench.plots import pyplot
from gla_core.cli.calls import device_here
from gla_core.demo.corpus import Corpus, folder, standard_library
from gla_core.demo.evaluate import held_out_windows, model_bits
from gla_core.demo.model import LanguageModel
from gla_core.demo.train import learning_rate, new_optimizer, sample, training_step
from gla_core.files import check_writable
from gla_core.terminal import message, new_console

DESCRIPTION = """\
Train a language model of gated linear attention, which reads bytes and predicts the next one.

  python examples/train_lm.py --preset 6m --steps 200 --out runs/small
  torchrun --nproc-per-node 8 examples/train_lm.py --preset 340m --data texts --steps 20000 --out runs/large

Under torchrun the model is sharded over the processes by FSDP2, on a GPU each, or on the CPU."""
EVALUATED = 2**17  # bytes of held-out text
REPORTS = 20  # lines that a whole training prints
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model, and of a step that suits it."""

    width: int
    layers: int
    heads: int
    window: int
    batch: int
    learning_rate: float


PRESETS = {
    "6m": Preset(width=256, layers=7, heads=4, window=256, batch=8, learning_rate=2e-3),
    "30m": Preset(width=512, layers=9, heads=4, window=512, batch=16, learning_rate=1e-3),
    "125m": Preset(width=768, layers=18, heads=4, window=1024, batch=16, learning_rate=6e-4),
    "340m": Preset(width=1024, layers=24, heads=4, window=2048, batch=16, learning_rate=3e-4),
}


@dataclass(frozen=True, slots=True)
class Options(Preset):
    """What the command line says; the preset's values where it says nothing."""

    preset: str
    data: Path | None
    steps: int
    accumulate: int
    seed: int
    device: str
    precision: str
    activation_checkpointing: bool
    compile: bool
    out: Path | None
    save_every: int
    evaluate_every: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train; end with one line where something is wrong."""
    options = read_options(arguments)
    try:
        train(options)
    except (ValueError, LookupError) as error:
        end(message(error), 2)
    except (OSError, NoBackendError) as error:
        end(message(error), 1)
    except KeyboardInterrupt:
        end("interrupted; the same command goes on from the last checkpoint in --out, if there is one", 130)


def train(options: Options) -> None:
    """Train from the beginning or the last checkpoint to the last step, and report."""
    device = device_here(options.device)
    repeat_bits()
    if options.out is not None:
        check_writable("--out", options.out, folder=True)
    corpus = standard_library() if options.data is None else folder_of(options.data)
    group = processes.start(device)
    check_sizes(options, corpus, group)
    settings = settings_of(options, corpus)
    last = None if options.out is None else checkpoints.newest(options.out)
    run = Run(settings) if last is None else checkpoints.read(last, settings)
    console = new_console() if group.rank == 0 else Console(quiet=True)
    training = new_training(options, group)
    introduce(options, corpus, training.model, group, console)
    if last is not None:
        checkpoints.restore(last, training)
        console.print(f"Going on after step {len(run.losses)} of {options.steps}, from {last}.", soft_wrap=True)
    speed = Speed(group.device)
    take_steps(options, corpus, training, run, group, speed, console)
    conclude(options, run, speed, console)
    processes.finish(group)


def repeat_bits() -> None:
    """Have PyTorch compute the same bits each time, or warn where it cannot: a training that goes on repeats itself."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by matrix products on a GPU
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def folder_of(data: Path) -> Corpus:
    """The text in --data."""
    try:
        return folder(data)
    except FileNotFoundError as error:
        raise ValueError(f"--data: {error}; name another folder") from None


def new_training(options: Options, group: Processes) -> Training:
    """The model, its optimizer and the generator of windows, before the first step; all alike in every process."""
    torch.manual_seed(options.seed)
    model = LanguageModel(options.width, options.layers, options.heads, mlp_width(options.width)).to(group.device)
    for block in model.blocks:
        if options.compile:
            block.forward = torch.compile(block.forward)
        if options.activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    processes.distribute(model, group, DTYPES[precision(options, group.device)])
    return Training(model, new_optimizer(model), torch.Generator().manual_seed(options.seed))


def mlp_width(width: int) -> int:
    """8/3 of the model's width, rounded up to a multiple of 256, as in flash-linear-attention's models."""
    return 256 * math.ceil(width * 8 / 3 / 256)


def precision(options: Options, device: torch.device) -> str:
    """What is computed in, if nothing was said bfloat16 on a GPU."""
    return options.precision if options.precision != "auto" else "bfloat16" if device.type == "cuda" else "float32"


# ---- training


def take_steps(
    options: Options,
    corpus: Corpus,
    training: Training,
    run: Run,
    group: Processes,
    speed: Speed,
    console: Console,
) -> None:
    """Train until `run` has the losses of all steps; print, evaluate and save on the way."""
    began, report_every = len(run.losses), max(1, options.steps // REPORTS)
    with new_bar(console) as bar:
        task = bar.add_task("training", total=options.steps, completed=began)
        for now in range(began + 1, options.steps + 1):
            run.losses.append(speed.measure(lambda: step(options, corpus, training, len(run.losses), group)))
            at_end = now == options.steps
            if now % report_every == 0 or at_end:
                recent = statistics.mean(run.losses[max(began, now - report_every) :])
                console.print(
                    f"step {now} of {options.steps}: {in_bits(recent):.3f} bits per byte, {pace(options, speed)}"
                )
            if now % options.evaluate_every == 0 or at_end:
                run.held_out[str(now)] = evaluate(options, corpus, training.model, group)
                console.print(
                    f"step {now} of {options.steps}: {run.held_out[str(now)]:.3f} bits per byte of held-out text"
                )
            if options.out is not None and (now % options.save_every == 0 or at_end):
                checkpoints.save(options.out, run, training, group.rank)
            bar.update(task, completed=now, status=pace(options, speed))


def step(options: Options, corpus: Corpus, training: Training, before: int, group: Processes) -> float:
    """Take the step after so many. Returns the loss of the whole batch before it, in nats per byte."""
    for settings in training.optimizer.param_groups:
        settings["lr"] = learning_rate(options.learning_rate, before / options.steps)
    windows = sample(corpus.train, options.batch, options.window, training.generator)
    return group.mean(training_step(training.model, training.optimizer, group.share(windows), options.accumulate))


def evaluate(options: Options, corpus: Corpus, model: LanguageModel, group: Processes) -> float:
    """Bits per byte of held-out text, every process reading as many windows."""
    windows = held_out_windows(corpus.held_out, options.window, max(EVALUATED // options.window, group.number))
    share = group.share(windows[: len(windows) // group.number * group.number])
    return group.mean(model_bits(model, share, options.batch // (group.number * options.accumulate)))


# ---- what is printed and drawn


def introduce(options: Options, corpus: Corpus, model: LanguageModel, group: Processes, console: Console) -> None:
    """Say what is trained, on what, and how."""
    size = sum(parameter.numel() for parameter in model.parameters())
    shared = "" if group.mesh is None else f", sharded by FSDP2 over {group.number} processes"
    console.print(
        f"The text: {options.data or 'the standard library of Python'}. "
        f"{len(corpus.train) / 1e6:.2f} MB to learn from, {len(corpus.held_out) / 1e6:.2f} MB held out.\n"
        f"The model: {size:,} parameters on {group.device}{shared}, computed in {precision(options, group.device)}.",
        soft_wrap=True,
    )


def new_bar(console: Console) -> Progress:
    """A progress bar in a terminal, nothing where output is piped."""
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    status = TextColumn("{task.fields[status]}")
    return Progress(*columns, status, console=console, disable=not console.is_terminal, transient=True)


def pace(options: Options, speed: Speed) -> str:
    """Tokens a second, in words."""
    return f"{speed.per_second(options.batch * options.window):,.0f} tokens/s"


def conclude(options: Options, run: Run, speed: Speed, console: Console) -> None:
    """Say how fast it was, and where the results are."""
    if speed.seconds:
        console.print(f"Speed: {pace(options, speed)}; tokens are bytes.")
    if speed.shares:
        share = statistics.mean(speed.shares)
        console.print(
            f"Of a step, {share:.0%} is GLA ops and their gradients, by PyTorch's profiler over {PROFILED} steps."
        )
    if options.out is not None and not console.quiet:
        console.print(f"Checkpoint and losses: {checkpoints.newest(options.out)}.", soft_wrap=True)
        try:
            draw(run, options.out / "loss.png")
            console.print(f"The loss as a picture: {options.out / 'loss.png'}.", soft_wrap=True)
        except ValueError as error:
            console.print(f"The loss was not drawn: {error}")


def draw(run: Run, target: Path) -> None:
    """Draw the loss of every step and of held-out text, as PNG. Raises ValueError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(run.losses) + 1), [in_bits(loss) for loss in run.losses], linewidth=0.8, label="training")
    axes.plot([int(number) for number in run.held_out], list(run.held_out.values()), "o-", label="held-out text")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120, bbox_inches="tight")
    plt.close(figure)


def in_bits(nats: float) -> float:
    """Bits per byte, of nats."""
    return nats / math.log(2)


# ---- the command line


def settings_of(options: Options, corpus: Corpus) -> dict[str, Any]:
    """What decides the losses, under the names that a user knows; a run goes on with the same."""
    names = ("width", "layers", "heads", "window", "batch", "learning_rate", "steps", "seed", "precision")
    values = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    return {**values, "the number of bytes in --data": len(corpus.train)}


def check_sizes(options: Options, corpus: Corpus, group: Processes) -> None:
    """Raise ValueError where the sizes do not fit each other, the text or the processes."""
    if options.width % (2 * options.heads):
        raise ValueError(f"--width is {options.width}; expected a multiple of twice --heads, {2 * options.heads}")
    parts = group.number * options.accumulate
    if options.batch % parts:
        raise ValueError(
            f"--batch is {options.batch}; expected a multiple of {parts}, the number of processes times --accumulate"
        )
    least = min(len(corpus.train), len(corpus.held_out) // group.number)
    if least <= options.window:
        raise ValueError(
            f"--window is {options.window}, but --data has {len(corpus.train)} bytes to learn from and "
            f"{len(corpus.held_out)} held out, and every process needs one more than --window of each; "
            "take a smaller --window or more text"
        )


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least` on, of at most 63 bits."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"it is {text!r}; expected a whole number, at least {least}")
        return int(text)

    return read


def rate(text: str) -> float:
    """Reads a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text!r}; expected a number above 0, such as 1e-3")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        end(f"{message}; --help lists what there is", 2)


def end(text: str, code: int) -> NoReturn:
    """End with a line on stderr; of an error that all processes find, the first one's."""
    if code == 1 or os.environ.get("RANK", "0") == "0":
        print(f"train_lm.py: {text}", file=sys.stderr)
    raise SystemExit(code)


def read_options(arguments: Sequence[str] | None) -> Options:
    """What the command line says; the preset's values where it says nothing."""
    given = vars(parser().parse_args(arguments))
    return Options(
        **given | {name: value for name, value in asdict(PRESETS[given["preset"]]).items() if given[name] is None}
    )


def parser() -> argparse.ArgumentParser:
    """All options, with their help."""
    as_written = argparse.RawDescriptionHelpFormatter
    made = Parser("train_lm.py", description=DESCRIPTION, epilog=presets_in_words(), formatter_class=as_written)
    option = made.add_argument_group("the model").add_argument
    option("--preset", choices=PRESETS, default="6m", help="sizes from the table below (default: %(default)s)")
    option("--width", type=whole(1), metavar="N", help="width of the model, a multiple of twice --heads")
    option("--layers", type=whole(1), metavar="N", help="blocks of gated linear attention and an MLP")
    option("--heads", type=whole(1), metavar="N", help="heads of each gated linear attention")
    option = made.add_argument_group("the training").add_argument
    option(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder of text, read whole into memory; hidden and binary files "
        "are left out, about 5 %% is held out (default: the standard library of Python)",
    )
    option(
        "--steps", type=whole(1), default=1000, metavar="N", help="steps of the whole training (default: %(default)s)"
    )
    option("--window", type=whole(1), metavar="N", help="bytes that the model reads at once")
    option("--batch", type=whole(1), metavar="N", help="windows in a step, over all processes")
    option(
        "--accumulate",
        type=whole(1),
        default=1,
        metavar="N",
        help="read a process's windows in so many parts, one after another, to save memory (default: %(default)s)",
    )
    option(
        "--learning-rate",
        type=rate,
        metavar="X",
        help="of AdamW, at its peak: it rises over the first 5 %% of the steps and falls to 0 along a cosine",
    )
    option(
        "--seed", type=whole(0), default=0, metavar="N", help="of the weights and of the windows (default: %(default)s)"
    )
    option(
        "--evaluate-every",
        type=whole(1),
        default=250,
        metavar="N",
        help="steps between evaluations on held-out text; there is one at the end (default: %(default)s)",
    )
    option = made.add_argument_group("where and how it computes").add_argument
    option("--device", default="auto", help="auto, cpu, cuda or cuda:1; auto is cuda where there is one")
    option(
        "--precision",
        choices=("auto", *DTYPES),
        default="auto",
        help="bfloat16 is mixed precision: weights stay in float32; auto is bfloat16 on a GPU, else float32",
    )
    option(
        "--activation-checkpointing",
        action="store_true",
        help="compute the inside of every block again in the backward: less memory, more time",
    )
    option("--compile", action="store_true", help="compile the blocks by torch.compile; slow to start")
    option = made.add_argument_group("what is kept").add_argument
    option(
        "--out",
        type=Path,
        metavar="DIR",
        help="where checkpoints, losses and a picture of them go; the same command "
        "goes on from the last checkpoint there (default: nothing is kept)",
    )
    option(
        "--save-every",
        type=whole(1),
        default=250,
        metavar="N",
        help="steps between checkpoints; there is one at the end (default: %(default)s)",
    )
    return made


def presets_in_words() -> str:
    """A table of the presets, for the end of the help."""
    lines = ["presets:", "        " + "".join(f"{name.replace('_', ' '):>15}" for name in asdict(PRESETS["6m"]))]
    lines += [
        f"  {name:6}" + "".join(f"{value:15}" for value in asdict(sizes).values()) for name, sizes in PRESETS.items()
    ]
    return "\n".join(lines) + (
        "\n\n340m has the sizes of flash-linear-attention's 340M model. As it reads bytes instead of 32,000 tokens,\n"
        "it has 309M parameters."
    )


if __name__ == "__main__":
    main()
