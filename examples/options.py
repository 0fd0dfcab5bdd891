"""The command line of train_lm.py: its options, its help, and one-line errors."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

DESCRIPTION = """\
Train a language model of gated linear attention, which reads bytes and predicts the next one.

  python examples/train_lm.py --preset 6m --steps 200 --out runs/small
  torchrun --nproc-per-node 8 examples/train_lm.py --preset 340m --data texts --steps 20000 --out runs/large

Under torchrun the model is sharded over the processes by FSDP2, on a GPU each, or on the CPU. With --context-parallel N
each window is cut into parts, which N processes read together: for windows too long for one of them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Preset:
    """The sizes of a model, and of a training step that suits it."""

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
    """The values of the command line; options that are not given have the preset's values."""

    preset: str
    data: Path | None
    steps: int
    accumulate: int
    seed: int
    device: str
    precision: str
    context_parallel: int
    activation_checkpointing: bool
    compile: bool
    out: Path | None
    save_every: int
    evaluate_every: int


def whole(least: int) -> Callable[[str], int]:
    """Returns a parser for whole numbers from `least` up to 63 bits."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"it is {text!r}; expected a whole number, at least {least}")
        return int(text)

    return read


def rate(text: str) -> float:
    """Parses a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text!r}; expected a number above 0, such as 1e-3")
    return value


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        end(f"{message}; --help lists what there is", 2)


def end(text: str, code: int) -> NoReturn:
    """Ends the program with a line on stderr; for errors that all processes find, only rank 0 prints it."""
    if code == 1 or os.environ.get("RANK", "0") == "0":
        print(f"train_lm.py: {text}", file=sys.stderr)
    raise SystemExit(code)


def read_options(arguments: Sequence[str] | None) -> Options:
    """Parses the command line; options that are not given have the preset's values."""
    parsed = vars(parser().parse_args(arguments))
    return Options(
        **parsed | {name: value for name, value in asdict(PRESETS[parsed["preset"]]).items() if parsed[name] is None}
    )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all options, with their help."""
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
        help="read a process's windows in this many slices, one by one, to save memory (default: %(default)s)",
    )
    option(
        "--learning-rate",
        type=rate,
        metavar="X",
        help="peak learning rate of AdamW; it rises over the first 5 %% of the steps and falls to 0 along a cosine",
    )
    option(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the weights and of the windows (default: %(default)s)",
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
        "--context-parallel",
        type=whole(1),
        default=1,
        metavar="N",
        help="processes that read a window together, each an equal part of it (default: %(default)s)",
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
    """Returns a table of the presets, for the end of the help."""
    lines = ["presets:", "        " + "".join(f"{name.replace('_', ' '):>15}" for name in asdict(PRESETS["6m"]))]
    lines += [
        f"  {name:6}" + "".join(f"{value:15}" for value in asdict(sizes).values()) for name, sizes in PRESETS.items()
    ]
    return "\n".join(lines) + (
        "\n\n340m has the sizes of flash-linear-attention's 340M model. As it reads bytes instead of 32,000 tokens,\n"
        "it has 309M parameters."
    )
