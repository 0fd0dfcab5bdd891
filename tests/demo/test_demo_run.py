"""The demo from beginning to end, with tiny sizes."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gla_core.demo import evaluate, train
from gla_core.demo.corpus import Corpus
from gla_core.demo.run import Options, run_demo
from gla_core.demo.train import Settings

TINY = Settings(width=16, blocks=1, heads=2, window=16, batch=4, learning_rate=1e-2, seconds=0.05)
CPU = torch.device("cpu")


def text(n):
    return torch.tensor(list(b"def f(x):\n    return x\n" * n), dtype=torch.uint8)


CORPUS = Corpus(text(50), text(10), (Path("a.py"), Path("b.py")), (Path("c.py"),))


def demo(options, settings=TINY):
    out = io.StringIO()
    good = run_demo(options, Console(file=out, width=200, markup=False, highlight=False), CORPUS, settings)
    return good, out.getvalue()


def test_it_shows_everything():
    good, out = demo(Options(CPU, steps=3, tokens=20))
    assert good  # after three steps the model need not beat the baselines
    for expected in (
        *("2 files to learn from", "1 files held out", "step 3"),
        *("unigram", "bigram", "gated linear attention", "falls short of the bigram model"),
        *("def ", "The logits agree", "Which backend ran each op"),
        *("chunk_gla_fwd  B=4 T=16 H=2 Hq=2 Hv=2 K=4 V=8 N=4", "chunk_gla_bwd  B=4", "recurrent_gla_step  B=1 H=2"),
        "reference",
    ):
        assert expected in out


def test_the_same_seed_writes_the_same_text():
    first, again, other = (demo(Options(CPU, steps=2, seed=seed, tokens=40))[1] for seed in (0, 0, 1))

    def written(out):
        return out.split("in the recurrent form:")[1].split("held-out bytes")[0]

    assert written(first) == written(again) != written(other)


def test_a_full_training_must_beat_the_bigram_model():
    good, out = demo(Options(CPU, tokens=5))
    assert "falls short" in out
    assert not good


def test_forms_that_disagree_are_a_failure(monkeypatch):
    real = evaluate.both_forms
    monkeypatch.setattr(evaluate, "both_forms", lambda model, text: (real(model, text)[0], real(model, text)[1] + 1))
    good, out = demo(Options(CPU, steps=1, tokens=5))
    assert "The logits DISAGREE: they differ by at most 1.0e+00" in out
    assert not good


def test_ctrl_c_ends_the_training_and_nothing_else(monkeypatch):
    steps = []
    real = train.training_step

    def interrupted(*args):
        if len(steps) == 4:
            raise KeyboardInterrupt
        steps.append(real(*args))
        return steps[-1]

    monkeypatch.setattr(train, "training_step", interrupted)
    good, out = demo(Options(CPU, tokens=5), replace(TINY, seconds=1e6))
    assert good
    assert len(steps) == 4
    assert "Interrupted: going on with what was learned so far" in out
    assert "gated linear attention" in out
    assert "The logits agree" in out


def test_a_second_ctrl_c_ends_the_demo(monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "training_step", interrupt)
    monkeypatch.setattr(evaluate, "model_bits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo(Options(CPU))


def test_what_a_terminal_would_obey_is_not_written(monkeypatch):
    monkeypatch.setattr(evaluate, "generate", lambda *_: iter(b"a\x1b[2Jb\xc3\xa9\xffc\n"))
    _, out = demo(Options(CPU, steps=1))
    assert "def a�[2Jbé�c\n" in out
