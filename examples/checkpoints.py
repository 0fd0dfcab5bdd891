"""The checkpoints of a training run, one folder each; if the processes are killed, the last complete one remains.

    OUT/step-200/               files of torch.distributed.checkpoint; each process writes its shard of the state
    OUT/step-200/run.json       the settings of the run, its reports so far, and the sizes of the other files
    OUT/step-250.unfinished/    a checkpoint that is being written, or that a killed run left

A folder gets its name when it is complete and on disk; then the earlier checkpoints are deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gla_core.demo.model import LanguageModel
from gla_core.files import write_json

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process needs none


@dataclass(slots=True)
class Run:
    """The state of a run.

    Attributes:
        losses: loss of every step, in nats. held_out: bits per byte of held-out text, by step.
        files: size in bytes of each file of the last checkpoint, without run.json.
    """

    settings: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Training:
    """The state that training changes. The generator draws the windows of text; nothing else is random."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator

    def state(self) -> dict[str, Any]:
        """Returns the whole state as tensors, with the weights sharded as they are."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "generator": self.generator.get_state()}


def save(out: Path, run: Run, training: Training, rank: int) -> None:
    """Writes a checkpoint, then removes all others. Every process calls this, with its rank.

    Raises OSError if it cannot be written; the last checkpoint then stays.
    """
    final = out / f"step-{len(run.losses)}"
    unfinished = final.with_name(f"{final.name}.unfinished")
    try:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        state_dict_saver.save(training.state(), checkpoint_id=unfinished)
        if rank == 0:
            run.files = {path.name: path.stat().st_size for path in unfinished.iterdir()}
            write_json(unfinished / "run.json", asdict(run))
            _to_disk(unfinished / "run.json")
            unfinished.replace(final)
    except (OSError, CheckpointException) as error:
        raise _not_written(final, _cause(error), rank) from None
    if rank == 0:
        for other in out.glob("step-*"):
            if other != final:
                shutil.rmtree(other)


def _to_disk(path: Path) -> None:
    """Waits until a file is on disk, as PyTorch does with the files that it writes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _cause(error: BaseException) -> BaseException:
    """Returns the error to report: the first of several processes' errors, and the system's before PyTorch's.

    Raises `error` itself if it is not about the files, such as Ctrl-C or too little memory.
    """
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, KeyboardInterrupt | MemoryError | torch.OutOfMemoryError):
        raise error
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0].removesuffix(": ")


def _not_written(final: Path, cause: BaseException, rank: int) -> OSError | SystemExit:
    """Returns the error to raise; only one process reports it."""
    if rank > 0:
        return SystemExit(1)
    free = shutil.disk_usage(final.parent).free / 1e9
    return OSError(
        f"{final} cannot be written: {_in_words(cause)} ({free:.2f} GB are free there); "
        f"make room, and the same command {_then(final)}"
    )


def _then(checkpoint: Path) -> str:
    """Returns, in words, how the same command goes on without this checkpoint."""
    before = newest(checkpoint.parent, but=checkpoint)
    return "begins again" if before is None else f"goes on from {before}"


def newest(out: Path, but: Path | None = None) -> Path | None:
    """Returns the folder of the last complete checkpoint of a run, apart from `but`."""
    complete = (path for path in out.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path != but)
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read(checkpoint: Path, settings: dict[str, Any]) -> Run:
    """Returns the run of a checkpoint. Raises ValueError if a file is incomplete or the run has other settings.

    Settings that did not exist yet when the run was saved are not compared.
    """
    try:
        run = Run(**json.loads((checkpoint / "run.json").read_text()))
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise _damaged(checkpoint, f"run.json is missing or cut short ({_in_words(error)})") from None
    for name, size in run.files.items():
        path = checkpoint / name
        if not path.exists():
            raise _damaged(checkpoint, f"{name} is missing")
        if (actual := path.stat().st_size) != size:
            raise _damaged(checkpoint, f"{name} has {actual:,} bytes, and {size:,} were written")
    for name, value in settings.items():
        if run.settings.get(name, value) != value:
            raise ValueError(
                f"{name} is {value}, but the run in {checkpoint.parent} began with {run.settings.get(name)}; "
                "repeat that to go on with it, or begin another with another --out"
            )
    return run


def _damaged(checkpoint: Path, what: str) -> ValueError:
    return ValueError(f"{checkpoint} is damaged: {what}; delete this folder, and the same command {_then(checkpoint)}")


def restore(checkpoint: Path, training: Training) -> None:
    """Loads a checkpoint into the training, which any number of processes may have written.

    Raises ValueError if the checkpoint is damaged.
    """
    state = training.state()
    try:
        state_dict_loader.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from None
        raise _damaged(checkpoint, f"its weights cannot be read ({_in_words(cause)})") from None
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    training.generator.set_state(state["generator"])
