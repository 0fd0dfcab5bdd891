import json
import sysconfig
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ("--width=16", "--layers=2", "--heads=2", "--window=32", "--batch=4", "--learning-rate=1e-2", "--device=cpu")


@pytest.fixture(autouse=True)
def isolated(fresh_registry, plain_terminal, monkeypatch):
    """Runs every test here on one thread, as the number of threads affects rounding, and restores global state."""
    monkeypatch.syspath_prepend(EXAMPLES)  # as when a script of it runs
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def texts(tmp_path):
    """A folder with one file: 47,500 bytes for training and 2500 held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    (folder / "text").write_bytes(text[:50_000])
    return folder


@pytest.fixture
def arguments(texts):
    """The arguments for a tiny model on little text."""
    return [*SIZES, f"--data={texts}"]


@pytest.fixture
def train(arguments):
    """A function: `train(out, ...)` trains in this process, with more arguments, and returns the losses."""
    import train_lm

    def run(out, *more):
        train_lm.main([*arguments, f"--out={out}", *more])
        return read_losses(out)

    return run


@pytest.fixture
def losses():
    """A function: `losses(out)` returns the losses of all steps up to the last checkpoint."""
    return read_losses


def read_losses(out):
    import checkpoints

    last = checkpoints.newest(out)
    assert last is not None
    return json.loads((last / "run.json").read_text())["losses"]
