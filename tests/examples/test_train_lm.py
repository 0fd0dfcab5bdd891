"""The example that trains a language model: it learns; its options, its files, its errors."""

import functools
import io
import statistics
import sys

import pytest
import torch
from rich.console import Console
from torch.nn.functional import logsigmoid

import gla_core as gla


def test_it_learns(capsys):
    import train_lm

    sizes = ("--width=32", "--layers=2", "--window=64", "--batch=16", "--learning-rate=1e-2", "--device=cpu")
    train_lm.main([*sizes, "--steps=60", "--evaluate-every=60"])
    out = capsys.readouterr().out
    first, last = (float(line.split(": ")[1].split()[0]) for line in (find(out, "step 3 of 60"), find(out, "step 60")))
    held_out = float(find(out, "held-out text").split(": ")[1].split()[0])
    assert first == pytest.approx(8, abs=0.3)  # bits for 256 bytes
    assert last < 5
    assert held_out < 5
    assert "% is GLA ops" in out
    assert "tokens/s" in find(out, "Speed")


def find(out, text):
    return next(line for line in out.splitlines() if text in line)


def test_how_it_is_computed_leaves_the_losses(train, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    plain = train(tmp_path / "plain", "--steps=2")
    assert train(tmp_path / "1", "--steps=2", "--activation-checkpointing", "--compile") == plain
    parts = train(tmp_path / "2", "--steps=2", "--accumulate=2")
    half = train(tmp_path / "3", "--steps=2", "--precision=bfloat16")
    assert plain != parts == pytest.approx(plain, rel=1e-5)
    assert plain != half == pytest.approx(plain, rel=1e-2)


@pytest.mark.thorough
def test_the_seed_decides(train, tmp_path):
    one, again, other = (train(tmp_path / f"{i}", "--steps=3", f"--seed={seed}") for i, seed in enumerate((1, 1, 2)))
    assert one == again
    assert one != other


def test_a_finished_training_is_left_as_it_is(train, tmp_path, capsys):
    losses = train(tmp_path, "--steps=2")
    (tmp_path / "loss.png").unlink()
    capsys.readouterr()
    assert train(tmp_path, "--steps=2") == losses
    out = capsys.readouterr().out
    assert "Going on after step 2 of 2" in out
    assert "step 2 of 2: " not in out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_has_a_bar(train, tmp_path, monkeypatch):
    import train_lm

    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr(train_lm, "new_console", lambda: console)
    train(tmp_path, "--steps=2")
    out = console.file.getvalue()
    assert "100%" in out
    assert "bits per byte of held-out text" in out


def test_without_matplotlib(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert len(train(tmp_path, "--steps=2")) == 2
    assert "The loss was not drawn: plots need matplotlib: pip install" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--device=gpu", "unknown device 'gpu'; expected auto, cpu, cuda or cuda:1"),
        ("--width=18", "--width is 18; expected a multiple of twice --heads, 4"),
        ("--accumulate=3", "--batch is 4; expected a multiple of 3, the number of processes times --accumulate"),
        ("--context-parallel=2", "--context-parallel is 2; expected a divisor of the number of processes, 1"),
        ("--steps=0", "argument --steps: it is '0'; expected a whole number, at least 1"),
        ("--seed=1.5", "argument --seed: it is '1.5'; expected a whole number, at least 0"),
        ("--learning-rate=x", "argument --learning-rate: it is 'x'; expected a number above 0, such as 1e-3"),
        ("--preset=7m", "argument --preset: invalid choice: '7m' (choose from "),
        ("--data=/nowhere", "--data: /nowhere is no folder with text files in it"),
        ("--window=2500", "--window is 2500, but --data has 47500 bytes to learn from and 2500 held out"),
        ("--out=/dev/null", "--out /dev/null is no folder; name another path"),
        ("--wrong", "unrecognized arguments: --wrong"),
    ],
)
def test_errors_are_one_line(option, expected, train, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, option)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.err.startswith(f"train_lm.py: {expected}")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_run_goes_on_with_its_own_settings(train, tmp_path, capsys):
    train(tmp_path, "--steps=2")
    for option, expected in (("--steps=3", "--steps is 3, but"), ("--batch=8", "--batch is 8, but")):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            train(tmp_path, "--steps=2", option)
        captured = capsys.readouterr()
        assert captured.err.startswith(f"train_lm.py: {expected} the run in {tmp_path} began with ")
        assert (captured.err.count("\n"), captured.out) == (1, "")


def test_help_tells_of_every_option_and_preset(capsys):
    import options
    import train_lm

    with pytest.raises(SystemExit):
        train_lm.main(["--help"])
    out = capsys.readouterr().out
    assert [action.dest for action in options.parser()._actions if not action.help] == []
    for preset, sizes in options.PRESETS.items():
        assert f"{preset} " in out
        assert f" {sizes.width} " in out


def test_the_presets_have_the_sizes_that_they_are_named_after():
    import options
    import train_lm

    for preset, sizes in options.PRESETS.items():
        with torch.device("meta"):
            model = train_lm.LanguageModel(sizes.width, sizes.layers, sizes.heads, train_lm.mlp_width(sizes.width))
        number = sum(parameter.numel() for parameter in model.parameters())
        named = float(preset.removesuffix("m")) * 1e6
        assert number == pytest.approx(309e6 if preset == "340m" else named, rel=0.04)  # 256 bytes, not 32,000 tokens


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [False, True])
def test_the_share_of_gla_ops(autocast):
    import speed

    q = torch.randn(1, 1024, 4, 32, requires_grad=True)  # long enough that the rest of the step does not matter
    other = torch.randn(1024, 1024)

    def gla_alone():
        with torch.autocast("cpu", enabled=autocast):
            o, _ = gla.chunk_gla(q, q, q, logsigmoid(q))
        o.sum().backward()
        return 3.0

    def nothing_of_gla():
        return float(sum((other @ other).sum() for _ in range(10)))

    def half():
        return gla_alone() + nothing_of_gla()

    for step in (gla_alone, nothing_of_gla):  # the first time takes longer
        step()
    steps = (gla_alone, half, nothing_of_gla)
    shares = [statistics.median(speed.profiled(s, q.device)[1] for _ in range(3)) for s in steps]
    assert speed.profiled(gla_alone, q.device)[0] == 3
    assert 0.6 < shares[0] <= 1
    assert shares[0] > shares[1] > shares[2] == 0
