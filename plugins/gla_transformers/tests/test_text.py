"""`gla generate`, with a model and a tokenizer of bytes in a folder."""

import io
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import gla_transformers
from gla_tools.command import app
from gla_transformers import accelerate, text
from gla_transformers.text import Options, run_generate, speed

PROMPT = "Once upon"


@pytest.fixture
def folder(ours, hybrid_of, tmp_path, request):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    kind = getattr(request, "param", "gla")
    is_ours = kind in ("gla", "hgrn2")
    model = ours(vocab_size=256, model_type=kind) if is_ours else hybrid_of(kind, vocab_size=256)
    model.lm_head.weight.data[[i for i, letter in enumerate(alphabet) if not letter.isascii()]] = 0
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])


def expected(folder, **how):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    made = getattr(gla_transformers, name, None) or getattr(transformers, name)
    model = made.from_pretrained(folder).eval()
    with accelerate():  # transformers may have bound FLA's kernels, which need a GPU
        return tokenizer.decode(model.generate(tokens, max_new_tokens=12, **how)[0]) + "\n"


@pytest.fixture
def undone(monkeypatch):
    """Has what `gla generate` replaces replaced until the end of a test alone."""
    made = []
    monkeypatch.setattr(text, "accelerate", lambda *names: made.append(accelerate(*names)))
    yield made
    for replacements in made:
        replacements.undo()


@pytest.mark.parametrize("folder", ["gla", "hgrn2", "Mamba2", "Qwen3_5"], indirect=True)
def test_greedy(run, folder, undone):
    result = run(folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 0)
    assert (result.exit_code, result.stdout) == (0, expected(folder, do_sample=False))
    assert result.stdout.startswith(PROMPT)
    assert len(result.stdout) == len(PROMPT) + 13
    assert re.fullmatch(r"prompt: 9 tokens, \d+ tokens/s, decoding: 11 tokens, \d+ tokens/s\n", result.stderr)


def test_speed():
    assert speed(100, [1.0, 1.5, 1.6, 1.7]) == "prompt: 100 tokens, 200 tokens/s, decoding: 2 tokens, 10 tokens/s"
    assert speed(100, [1.0, 1.5]) == "prompt: 100 tokens, 200 tokens/s"


def test_sampling(run, folder):
    arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 5.0)
    first, second = (run(*arguments, "--seed", seed).stdout for seed in (3, 4))
    torch.manual_seed(3)
    assert first == expected(folder, do_sample=True, temperature=5.0)
    assert first != second


def test_piped_and_in_bfloat16(folder):
    command = [sys.executable, "-m", "gla_core", "generate", folder, "--prompt", PROMPT, "--dtype", "bfloat16"]
    result = subprocess.run([*map(str, command), "--device", "cpu"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (0, 1)
    assert result.stdout.startswith(PROMPT)


@pytest.fixture
def says(run):
    """Runs the command, and returns the one line of its error."""

    def says(*arguments):
        result = run(*arguments)
        assert result.exit_code == 2, result.exception
        assert result.output.count("\n") == 1, result.output
        return result.output

    return says


def test_text_that_standard_output_cannot_encode(run, folder, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    run_generate(Options(folder, "Café ", torch.device("cpu"), max_new_tokens=2, temperature=0))
    assert written.getvalue().startswith(b"Caf? ")


@pytest.mark.parametrize("left", [0, 4, 300, -2])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_files_that_are_cut_short(says, folder, name, left):
    file = folder / name
    file.write_bytes(file.read_bytes()[:left])
    what = {"model.safetensors": "model", "config.json": "configuration", "tokenizer.json": "tokenizer"}[name]
    said = says(folder, "--prompt", PROMPT)
    assert f"{folder} has no {what} that transformers reads (" in said
    assert "expected files that save_pretrained has written, whole" in said


def test_wrong_questions(run, says, folder, tmp_path):
    assert "no config.json" in says(tmp_path / "nothing", "--prompt", PROMPT)
    assert "the prompt has no tokens" in says(folder, "--prompt", "")
    assert "did you mean 'float16'" in says(folder, "--prompt", PROMPT, "--dtype", "floot16")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer that transformers reads" in says(folder, "--prompt", PROMPT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lacks the weights model.layers.2.attn.g_norm_swish_gate.weight, " in says(folder, "--prompt", PROMPT)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert "has model.layers.0.mlp.down_proj.weight [32, 48]; expected [32, 40]" in says(folder, "--prompt", PROMPT)
    (folder / "config.json").write_text("[1]")
    assert "has no configuration that transformers reads" in says(folder, "--prompt", PROMPT)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert "a model of type 'llama'; expected one of 'gla', 'hgrn2', 'bamba'" in says(folder, "--prompt", PROMPT)


def test_a_tokenizer_of_another_model(run, folder, ours):
    ours(vocab_size=61).save_pretrained(folder)
    result = run(folder, "--prompt", PROMPT)
    assert result.exit_code == 2
    assert "expected the tokenizer that the model was trained with" in result.output
