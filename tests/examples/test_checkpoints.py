"""Damaged checkpoints, checkpoints that cannot be written, and changed texts: each gives an error of one sentence."""

import errno
import json
import os
import resource

import pytest


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Omits the picture of the losses, which takes as long as the training, from tests of other things."""
    import train_lm

    if "picture" not in request.function.__name__:
        monkeypatch.setattr(train_lm, "draw", lambda run, target: None)


@pytest.fixture
def ended(capsys):
    """A function: `ended(train, ...)` returns the line with which a training ends, and its exit code."""

    def run(train, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            train(*arguments)
        err = capsys.readouterr().err
        assert err.startswith("train_lm.py: ")
        assert err.count("\n") == 1
        return err.removeprefix("train_lm.py: ").rstrip("\n"), end.value.code

    return run


def test_a_file_that_is_cut_short_or_missing(train, tmp_path, ended):
    whole = train(tmp_path, "--steps=2")
    last = tmp_path / "step-2"
    then = "delete this folder, and the same command begins again"
    for path in list(last.iterdir()):
        content = path.read_bytes()
        says = "run.json is missing or cut short (" if path.name == "run.json" else f"{path.name} "
        for cut in (0, len(content) // 2, len(content) - 3, None):
            path.unlink() if cut is None else path.write_bytes(content[:cut])
            message, code = ended(train, tmp_path, "--steps=2")
            assert message.startswith(f"{last} is damaged: {says}")
            assert message.endswith(then)
            assert code == 2
        path.write_bytes(content)
    assert train(tmp_path, "--steps=2") == whole


def test_the_sentence_says_which_checkpoint_comes_before(train, tmp_path, ended):
    train(tmp_path, "--steps=2")
    (tmp_path / "step-1").mkdir()  # complete, as if a run had been killed before deleting it
    (tmp_path / "step-2" / "run.json").write_text("{")
    message, _ = ended(train, tmp_path, "--steps=2")
    assert message.endswith(f"delete this folder, and the same command goes on from {tmp_path / 'step-1'}")


def test_weights_of_the_right_size_that_cannot_be_read(train, tmp_path, ended):
    train(tmp_path, "--steps=2")
    (weights,) = (tmp_path / "step-2").glob("*.distcp")
    weights.write_bytes(bytes(weights.stat().st_size))
    message, code = ended(train, tmp_path, "--steps=2")
    assert message.startswith(f"{tmp_path / 'step-2'} is damaged: its weights cannot be read (")
    assert code == 2


@pytest.fixture
def largest_file():
    """A function: `largest_file(n)` limits files to n bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [3000, 200_000])
def test_weights_that_cannot_be_written(room, train, losses, tmp_path, ended, largest_file):
    whole = train(tmp_path / "whole", "--steps=2", "--save-every=1")
    out = tmp_path / "full"
    train_to_step_1(train, out)
    largest_file(room)
    message, code = ended(train, out, "--steps=2", "--save-every=1")
    largest_file(resource.RLIM_INFINITY)
    assert message.startswith(f"{out / 'step-2'} cannot be written: File too large (")
    assert message.endswith(f"make room, and the same command goes on from {out / 'step-1'}")
    assert code == 1
    assert losses(out) == whole[:1]
    assert train(out, "--steps=2", "--save-every=1") == whole
    assert [path.name for path in out.iterdir()] == ["step-2"]


def test_a_record_that_cannot_be_written(train, losses, tmp_path, ended, monkeypatch):
    train_to_step_1(train, tmp_path)
    flush = os.fsync

    def full(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith("run.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(os, "fsync", full)
    message, code = ended(train, tmp_path, "--steps=2", "--save-every=1")
    assert message.startswith(f"{tmp_path / 'step-2'} cannot be written: No space left on device (")
    assert code == 1
    assert len(losses(tmp_path)) == 1


def train_to_step_1(train, out):
    """Trains until an interruption in the second step, after the checkpoint of the first."""
    import train_lm

    with pytest.MonkeyPatch.context() as patch:
        real = train_lm.step
        patch.setattr(train_lm, "step", lambda *arguments: real(*arguments) if arguments[3] == 0 else interrupt())
        with pytest.raises(SystemExit):
            train(out, "--steps=2", "--save-every=1")


def interrupt():
    raise KeyboardInterrupt


def test_ctrl_c_while_a_checkpoint_is_written(train, tmp_path, ended, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: interrupt())
    assert ended(train, tmp_path, "--steps=2") == (
        "interrupted; the same command goes on from the last checkpoint in --out, if there is one",
        130,
    )


def test_a_picture_that_cannot_be_written_ends_nothing(train, tmp_path, capsys):
    (tmp_path / "loss.png").mkdir()
    assert len(train(tmp_path, "--steps=2")) == 2
    assert "The loss was not drawn: " in capsys.readouterr().out


def test_another_text_of_the_same_size(train, texts, tmp_path, ended):
    out, path = tmp_path / "out", texts / "text"
    whole, text = train(out, "--steps=2"), path.read_bytes()
    path.write_bytes(text[:-1] + b"#")  # the held-out byte
    message, code = ended(train, out, "--steps=2")
    assert message.startswith("the text in --data (its SHA-256) is ")
    assert f", but the run in {out} began with " in message
    assert code == 2
    path.write_bytes(text)
    assert train(out, "--steps=2") == whole


def test_a_run_that_did_not_keep_its_text_nor_the_sizes_of_its_files_goes_on(train, tmp_path):
    whole = train(tmp_path, "--steps=2")
    record = tmp_path / "step-2" / "run.json"
    run = json.loads(record.read_text())
    assert set(run.pop("files")) == {".metadata", "__0_0.distcp"}
    assert len(run["settings"].pop("the text in --data (its SHA-256)")) == 16
    record.write_text(json.dumps(run))
    assert train(tmp_path, "--steps=2") == whole
