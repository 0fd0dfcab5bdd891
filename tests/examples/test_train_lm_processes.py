"""Trainings that are killed and resumed, and trainings on two processes, have the losses of an undisturbed training."""

import os
import shutil
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
SECONDS = 120  # limit for each of them

Start = Callable[..., list[subprocess.Popen]]


@pytest.fixture
def start(arguments):
    """A function: `start(number, ...)` starts the example in new processes; two and more as torchrun does."""

    def begin(number, *more):
        environments = in_group(number) if number > 1 else [{}]
        command = [sys.executable, str(SCRIPT), *arguments, *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return [subprocess.Popen(command, env={**os.environ, **more}, **pipes) for more in environments]

    return begin


def in_group(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number)}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


def wait(processes):
    """Waits for the processes, and returns their output."""
    outs = []
    for process in processes:
        outs.append(process.communicate(timeout=SECONDS)[0])
        assert process.returncode == 0, outs[-1]
    return "".join(outs)


def kill_when(processes, there):
    """Kills processes as soon as `there` returns True; they have to run until then."""
    end = time.monotonic() + SECONDS
    while not there() and processes[0].poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    for process in processes:
        process.kill()
    outputs = [process.communicate()[0] for process in processes]
    assert processes[0].returncode == -9, outputs[0]


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(train, start, losses, tmp_path, capfd):
    whole = train(tmp_path / "whole", "--steps=8", "--save-every=2")
    out = tmp_path / "killed"
    common = ("--steps=8", "--save-every=2", f"--out={out}")

    def half_written():
        return any(out.glob("*.unfinished")) and any(out.glob("step-*[0-9]"))

    while not half_written():  # once more if it was complete before the kill
        kill_when(start(1, *common), half_written)
    done = len(losses(out))
    assert 2 <= done < 8
    assert train(out, *common) == whole
    assert f"Going on after step {done} of 8" in capfd.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "step-8"]


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_read_each_window_together(train, start, losses, tmp_path):
    common = ("--steps=3", "--save-every=3", "--activation-checkpointing")
    out = wait(start(2, *common, "--context-parallel=2", f"--out={tmp_path / 'together'}"))
    assert "sharded by FSDP2 over 2 processes, 2 to a window" in out
    assert "% is GLA ops" in out
    assert " 0% is GLA ops" not in out
    assert losses(tmp_path / "together") == pytest.approx(train(tmp_path / "alone", *common), rel=1e-4)


@pytest.mark.thorough
def test_two_processes(train, start, losses, arguments, tmp_path):
    common = ("--steps=4", "--save-every=1")
    alone = train(tmp_path / "alone", *common)

    together, killed = tmp_path / "together", tmp_path / "killed"
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT), *arguments, *common]
    command = [sys.executable, *command, f"--out={together}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "sharded by FSDP2 over 2 processes" in done.stdout
    assert losses(together) == pytest.approx(alone, rel=1e-4)
    assert [c for c in done.stdout if unicodedata.category(c) == "Cc" and c != "\n"] == []
    assert done.stdout.count("bits per byte, ") == 4

    kill_when(start(2, *common, f"--out={killed}"), (killed / "step-2").exists)
    assert len(losses(killed)) in (2, 3)
    by_another_number = shutil.copytree(killed, tmp_path / "by another number")
    wait(start(2, *common, f"--out={killed}"))
    assert losses(killed) == losses(together)
    assert train(by_another_number, *common) == pytest.approx(alone, rel=1e-4)
