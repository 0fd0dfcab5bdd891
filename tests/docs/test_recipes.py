"""The recipes of docs/from-fla.md for training programs run for five steps on a CPU: `make test-fla`."""

import functools
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from gla_core.compat import fla as compat
from gla_core.compat.program import run

models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it: make test-fla")

import transformers

PAGE = (Path(__file__).parents[2] / "docs" / "from-fla.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n### In a training program\n")[1].split("\n## ")[0]
TRAINER, LIGHTNING = re.findall(r"```py\n(.*?)```", SECTION, re.DOTALL)
LAYERS, STEPS = 2, 5
FLAME = """
import sys
from train_gla import train
train(steps=int(sys.argv[sys.argv.index("--training.steps") + 1]))
"""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, tmp_path):
    """Has the recipes compute on a CPU what FLA has only in Triton, and undoes what they replace."""
    made = []

    def accelerate(**_):
        made.append(compat_accelerate(cpu=True))
        return made[-1]

    compat_accelerate = compat.accelerate
    monkeypatch.setattr(compat, "accelerate", accelerate)
    monkeypatch.chdir(tmp_path)
    yield made
    for acceleration in made:
        acceleration.undo()


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = models.GLAConfig(
        hidden_size=32, num_hidden_layers=LAYERS, num_heads=2, intermediate_size=48, vocab_size=61, pad_token_id=0
    )
    return models.GLAForCausalLM(config)


def rows():
    ids = torch.randint(1, 61, (2 * STEPS, 70))
    return [{"input_ids": row, "labels": row} for row in ids]


def check(made, output):
    """Checks that each layer of each step, and no other call, was computed here, and that this was printed."""
    (acceleration,) = made
    assert acceleration.served["chunk_gla"] == LAYERS * STEPS
    assert acceleration.left == {}
    assert f"- chunk_gla: {LAYERS * STEPS} here" in output


ARGUMENTS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}


def test_trainer(model, on_cpu, capsys):
    arguments = transformers.TrainingArguments("out", save_strategy="no", **ARGUMENTS)
    exec(TRAINER, {"model": model, "arguments": arguments, "dataset": rows()})
    check(on_cpu, capsys.readouterr().out)


def test_trl(model, on_cpu, capsys):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0} | {f"w{i}": i for i in range(1, 61)}, unk_token="w1"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="w2")
    arguments = trl.SFTConfig("out", save_strategy="no", bf16=False, gradient_checkpointing=False, **ARGUMENTS)
    dataset = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    trainer = functools.partial(trl.SFTTrainer, processing_class=tokenizer)
    code = TRAINER.replace("from transformers import Trainer\n", "")
    exec(code, {"Trainer": trainer, "model": model, "arguments": arguments, "dataset": dataset})
    check(on_cpu, capsys.readouterr().out)


def test_lightning(model, on_cpu, capsys):
    lightning = pytest.importorskip("lightning")
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    code = LIGHTNING.replace("from lightning import LightningModule, Trainer\n", "")
    names = {"LightningModule": lightning.LightningModule, "Trainer": functools.partial(lightning.Trainer, **options)}
    exec(code, names | {"model": model, "loader": loader})
    check(on_cpu, capsys.readouterr().out)


def test_flame(model, on_cpu, capsys, monkeypatch, tmp_path):
    """A package in flame's place; torchrun passes on what follows its own -m."""

    def train(steps):
        optimizer = torch.optim.AdamW(model.parameters())
        for row in rows()[:steps]:
            model(**{name: x[None] for name, x in row.items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    (tmp_path / "flame").mkdir()
    (tmp_path / "flame" / "train.py").write_text(FLAME)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "train_gla", type(sys)("train_gla"))
    sys.modules["train_gla"].train = train
    (arguments,) = re.findall(r"torchrun .* -m gla_core\.compat\.fla (.*)", SECTION)
    run("gla_core.compat.fla", compat.accelerate, {}, shlex.split(arguments.replace("$params", "--training.steps 5")))
    check(on_cpu, capsys.readouterr().err)
