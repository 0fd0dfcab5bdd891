"""Checkpoints of a training run, one folder each; whenever the processes are killed, the last whole one is there.

    OUT/step-200/               what torch.distributed.checkpoint writes, each process its part of weights and optimizer
    OUT/step-200/run.json       the settings of the run, and what it has printed so far
    OUT/step-250.unfinished/    being written, or what a killed run left

A folder gets its name when it is complete, and then those before it go.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gla_core.demo.model import LanguageModel
from gla_core.files import write_json

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is meant to be alone


@dataclass(slots=True)
class Run:
    """A run so far: its settings, the loss of every step, in nats, and bits per byte of held-out text by step."""

    settings: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Training:
    """What changes in training. The generator draws the windows of text, and nothing else is random."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator

    def state(self) -> dict[str, Any]:
        """All of it as tensors, the weights sharded as they are."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "generator": self.generator.get_state()}


def save(out: Path, run: Run, training: Training, rank: int) -> None:
    """Write a checkpoint, then remove all others. Every process calls this, by its rank."""
    final = out / f"step-{len(run.losses)}"
    unfinished = final.with_name(f"{final.name}.unfinished")
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        write_json(unfinished / "run.json", asdict(run))
    state_dict_saver.save(training.state(), checkpoint_id=unfinished)
    if rank == 0:
        unfinished.replace(final)
        for other in out.glob("step-*"):
            if other != final:
                shutil.rmtree(other)


def newest(out: Path) -> Path | None:
    """The folder of the last complete checkpoint of a run."""
    complete = (path for path in out.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read(checkpoint: Path, settings: dict[str, Any]) -> Run:
    """The run that a checkpoint is of. Raises ValueError unless it has these settings."""
    run = Run(**json.loads((checkpoint / "run.json").read_text()))
    for name, value in settings.items():
        if run.settings.get(name) != value:
            raise ValueError(
                f"{name} is {value}, but the run in {checkpoint.parent} began with {run.settings.get(name)}; "
                "repeat that to go on with it, or begin another with another --out"
            )
    return run


def restore(checkpoint: Path, training: Training) -> None:
    """Set the training to what a checkpoint holds, whatever the number of processes that wrote it."""
    state = training.state()
    state_dict_loader.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    training.generator.set_state(state["generator"])
