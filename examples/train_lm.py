"""Trains a GLA language model over bytes, on one device or, under torchrun, on several by FSDP2; see --help.

The model, the optimizer and the step come from `gla_core.demo`. Beside this file: `options.py` is the command
line, `processes.py` assigns each process its shard of the model and of a batch, `checkpoints.py` stores the training,
`speed.py` measures it.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import processes
import torch
from checkpoints import Run, Training
from options import DTYPES, Options, end, read_options
from processes import Processes
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from speed import PROFILED, Speed
from torch.utils.checkpoint import checkpoint

from gla_core import NoBackendError, UnknownBackendError
from gla_core.bench.plots import pyplot
from gla_core.cli.calls import device_here
from gla_core.demo.corpus import Corpus, folder, standard_library
from gla_core.demo.evaluate import held_out_windows, model_bits
from gla_core.demo.model import LanguageModel
from gla_core.demo.train import learning_rate, new_optimizer, sample, training_step
from gla_core.files import check_writable
from gla_core.terminal import message, new_console

EVALUATED = 2**17  # number of bytes of held-out text
REPORTS = 20  # number of lines that a whole training prints


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and trains; an error ends the program with one line."""
    options = read_options(arguments)
    try:
        train(options)
    except (ValueError, UnknownBackendError) as error:
        end(message(error), 2)
    except (OSError, NoBackendError) as error:
        end(message(error), 1)
    except KeyboardInterrupt:
        end("interrupted; the same command goes on from the last checkpoint in --out, if there is one", 130)


def train(options: Options) -> None:
    """Trains from the beginning or the last checkpoint to the last step, and reports."""
    device = device_here(options.device)
    repeat_bits()
    if options.out is not None:
        check_writable("--out", options.out, folder=True)
    corpus = standard_library() if options.data is None else folder_of(options.data)
    group = processes.start(device, options.context_parallel)
    check_sizes(options, corpus, group)
    settings = settings_of(options, corpus, device)
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
    """Makes PyTorch deterministic, or warn where it cannot be, so that a resumed training gives the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matrix products on a GPU
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def folder_of(data: Path) -> Corpus:
    """Returns the text in --data."""
    try:
        return folder(data)
    except FileNotFoundError as error:
        raise ValueError(f"--data: {error}; name another folder") from None


def new_training(options: Options, group: Processes) -> Training:
    """Returns the model, its optimizer and the generator of windows before the first step, equal in every process."""
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
    """Returns 8/3 of the model's width, rounded up to a multiple of 256, as in flash-linear-attention's models."""
    return 256 * math.ceil(width * 8 / 3 / 256)


def precision(options: Options, device: torch.device) -> str:
    """Returns the precision of the computation: --precision, or the meaning of "auto" on this device."""
    if options.precision != "auto":
        return options.precision
    return "bfloat16" if device.type == "cuda" else "float32"


# ---- training


def take_steps(
    options: Options, corpus: Corpus, training: Training, run: Run, group: Processes, speed: Speed, console: Console
) -> None:
    """Trains until `run` has the losses of all steps; prints, evaluates and saves on the way."""
    began, report_every = len(run.losses), max(1, options.steps // REPORTS)
    with new_bar(console) as bar:
        task = bar.add_task("training", total=options.steps, completed=began, status="")
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
    """Takes the step after `before` steps; returns the whole batch's loss before the update, in nats per byte."""
    for settings in training.optimizer.param_groups:
        settings["lr"] = learning_rate(options.learning_rate, before / options.steps)
    windows = sample(corpus.train, options.batch, options.window, training.generator)
    return group.mean(training_step(training.model, training.optimizer, group.share(windows), options.accumulate))


def evaluate(options: Options, corpus: Corpus, model: LanguageModel, group: Processes) -> float:
    """Returns the bits per byte of held-out text; every group reads the same number of windows."""
    windows = held_out_windows(corpus.held_out, options.window, max(EVALUATED // options.window, group.groups))
    share = group.share(windows[: len(windows) // group.groups * group.groups])
    return group.mean(model_bits(model, share, options.batch // (group.groups * options.accumulate)))


# ---- output


def introduce(options: Options, corpus: Corpus, model: LanguageModel, group: Processes, console: Console) -> None:
    """Prints the model, the text and the settings."""
    size = sum(parameter.numel() for parameter in model.parameters())
    shared = "" if group.mesh is None else f", sharded by FSDP2 over {group.number} processes"
    shared += "" if group.context is None else f", {group.context.size()} to a window"
    console.print(
        f"The text: {options.data or 'the standard library of Python'}. "
        f"{len(corpus.train) / 1e6:.2f} MB to learn from, {len(corpus.held_out) / 1e6:.2f} MB held out.\n"
        f"The model: {size:,} parameters on {group.device}{shared}, computed in {precision(options, group.device)}.",
        soft_wrap=True,
    )


def new_bar(console: Console) -> Progress:
    """Returns a progress bar, which is shown only in a terminal."""
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    status = TextColumn("{task.fields[status]}")
    return Progress(*columns, status, console=console, disable=not console.is_terminal, transient=True)


def pace(options: Options, speed: Speed) -> str:
    """Returns the tokens per second, in words."""
    return f"{speed.per_second(options.batch * options.window):,.0f} tokens/s"


def conclude(options: Options, run: Run, speed: Speed, console: Console) -> None:
    """Prints the speed, and where the results are."""
    if speed.seconds:
        console.print(f"Speed: {pace(options, speed)}; tokens are bytes.")
    if speed.shares:
        share = statistics.mean(speed.shares)
        seen = "an unknown part" if math.isnan(share) else f"{share:.0%}"
        console.print(f"Of a step, {seen} is GLA ops and their gradients, by PyTorch's profiler over {PROFILED} steps.")
    if options.out is not None and not console.quiet:
        console.print(f"Checkpoint and losses: {checkpoints.newest(options.out)}.", soft_wrap=True)
        try:
            draw(run, options.out / "loss.png")
            console.print(f"The loss as a picture: {options.out / 'loss.png'}.", soft_wrap=True)
        except (ValueError, OSError) as error:
            console.print(f"The loss was not drawn: {error}")


def draw(run: Run, target: Path) -> None:
    """Draws the loss of every step and of held-out text, as PNG. Raises ValueError without matplotlib."""
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
    """Converts nats per byte to bits per byte."""
    return nats / math.log(2)


# ---- settings and sizes


def settings_of(options: Options, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Returns the settings that decide the losses, by the names of their options; a resumed run needs the same ones."""
    names = ("width", "layers", "heads", "window", "batch", "learning_rate", "steps", "seed")
    values = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    text = {"the number of bytes in --data": len(corpus.train), "the text in --data (its SHA-256)": corpus.sha256()}
    return {**values, "--precision": precision(options, device), **text}


def check_sizes(options: Options, corpus: Corpus, group: Processes) -> None:
    """Raises ValueError if the sizes do not fit each other, the text or the processes."""
    if options.width % (2 * options.heads):
        raise ValueError(f"--width is {options.width}; expected a multiple of twice --heads, {2 * options.heads}")
    parts = group.groups * options.accumulate
    if options.batch % parts:
        over = "" if group.context is None else " over --context-parallel"
        raise ValueError(
            f"--batch is {options.batch}; expected a multiple of {parts}, "
            f"the number of processes{over} times --accumulate"
        )
    if options.window % options.context_parallel:
        raise ValueError(
            f"--window is {options.window}; expected a multiple of --context-parallel, {options.context_parallel}"
        )
    least = min(len(corpus.train), len(corpus.held_out) // group.groups)
    if least <= options.window:
        raise ValueError(
            f"--window is {options.window}, but --data has {len(corpus.train)} bytes to learn from and "
            f"{len(corpus.held_out)} held out, and every process or group of --context-parallel needs one more than "
            "--window of each; take a smaller --window or more text"
        )


if __name__ == "__main__":
    main()
