"""The corpus, the models that count, and the windows for their evaluation."""

import hashlib
import math

import pytest
import torch

from gla_core.demo import baselines, corpus
from gla_core.demo.evaluate import bits_of, held_out_windows
from gla_core.demo.train import sample


def bytes_of(text):
    return torch.tensor(list(text), dtype=torch.uint8)


@pytest.fixture
def library(tmp_path):
    """41 modules, and folders that have to be skipped."""
    for i in range(41):
        (tmp_path / f"module{i:02}.py").write_bytes(b"%02d\n" % i)
    for skipped in ("site-packages", "test", "encodings"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "m.py").write_bytes(b"skipped")
    (tmp_path / "notes.txt").write_bytes(b"skipped")
    return tmp_path


def test_files_are_found_in_order_and_some_left_out(library):
    names = [path.name for path in corpus.source_files(library)]
    assert names == [f"module{i:02}.py" for i in range(41)]


def test_every_twentieth_file_is_held_out(library):
    text = corpus.load(corpus.source_files(library))
    assert bytes(text.held_out.tolist()) == b"00\n20\n40\n"
    assert bytes(text.train.tolist()) == b"".join(b"%02d\n" % i for i in range(41) if i % 20)
    assert [path.name for path in text.held_out_files] == ["module00.py", "module20.py", "module40.py"]


def test_the_standard_library():
    text, again = corpus.standard_library(), corpus.standard_library()
    assert set(text.train_files).isdisjoint(text.held_out_files)
    assert len(text.train) > 5e6
    assert 0.02 < len(text.held_out) / len(text.train) < 0.1
    assert text.train_files == again.train_files
    assert torch.equal(text.held_out, again.held_out)
    assert not [path for path in text.train_files if "test" in path.parts or "site-packages" in path.parts]


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds 0 source files"):
        corpus.standard_library()


def test_a_folder_of_many_files_is_split_by_file(library):
    (library / ".hidden").write_bytes(b"hidden")
    (library / ".git").mkdir()
    (library / ".git" / "config").write_bytes(b"hidden")
    (library / "picture").write_bytes(b"\x89PNG\0")
    text = corpus.folder(library)
    files = [path.relative_to(library).as_posix() for path in sorted((*text.train_files, *text.held_out_files))]
    assert files == sorted(
        [
            *(f"module{i:02}.py" for i in range(41)),
            "notes.txt",
            *(f"{s}/m.py" for s in ("encodings", "site-packages", "test")),
        ]
    )
    assert [path.name for path in text.held_out_files] == ["m.py", "module19.py", "module39.py"]
    assert bytes(text.held_out.tolist()) == b"skipped19\n39\n"


def test_of_few_files_the_end_of_each_is_held_out(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(range(1, 41)))
    (tmp_path / "inner" / "b").write_bytes(b"b" * 19 + b"\n")
    text = corpus.folder(tmp_path)
    assert bytes(text.train.tolist()) == bytes(range(1, 39)) + b"b" * 19
    assert bytes(text.held_out.tolist()) == bytes((39, 40)) + b"\n"


def test_the_hash_is_of_all_bytes():
    one, other = (corpus.Corpus(bytes_of(train), bytes_of(b"c"), (), ()) for train in (b"ab", b"aB"))
    assert one.sha256() == hashlib.sha256(b"abc").hexdigest()[:16]
    assert other.sha256() == hashlib.sha256(b"aBc").hexdigest()[:16]


def test_a_folder_without_text(tmp_path):
    (tmp_path / "picture").write_bytes(b"\0")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="is no folder with text files in it"):
            corpus.folder(folder)


def test_unigram_by_hand():
    p = baselines.unigram(bytes_of(b"aab"))
    assert p[ord("a")] == 3 / 259
    assert p[ord("b")] == 2 / 259
    assert p[ord("c")] == 1 / 259
    assert float(p.sum()) == pytest.approx(1)
    # The first byte of a window is not predicted: a, then c.
    bits = baselines.unigram_bits(p, bytes_of(b"bac")[None])
    assert bits == pytest.approx(-(math.log2(3 / 259) + math.log2(1 / 259)) / 2)


def test_bigram_by_hand():
    p = baselines.bigram(bytes_of(b"aabab"))  # a: aa once, ab twice; b: ba once
    a, b, c = b"abc"
    one = {a: 4 / 261, b: 3 / 261, c: 1 / 261}  # the unigram
    assert float(p[a, b]) == pytest.approx((2 + one[b]) / 4)
    assert float(p[a, a]) == pytest.approx((1 + one[a]) / 4)
    assert float(p[b, c]) == pytest.approx((0 + one[c]) / 2)
    assert float(p[c, a]) == pytest.approx(one[a])  # c was never followed: the unigram
    torch.testing.assert_close(p.sum(1), torch.ones(256, dtype=torch.float64))
    windows = torch.stack([bytes_of(b"aab"), bytes_of(b"bab")])
    expected = -(p[a, a].log2() + 2 * p[a, b].log2() + p[b, a].log2()) / 4
    assert baselines.bigram_bits(p, windows) == pytest.approx(float(expected))


def test_bits_of_logits_by_hand():
    logits = torch.zeros(3, 256)
    logits[1, 7] = math.log(255)  # probability 1/2 for byte 7 after the second
    assert bits_of(logits, torch.tensor([1, 2, 7], dtype=torch.uint8)) == pytest.approx((8 + 1) / 2)


def test_windows_are_spread_and_do_not_overlap():
    text = torch.arange(100, dtype=torch.uint8)
    windows = held_out_windows(text, window=9, most=4)
    assert windows.tolist() == [list(range(start, start + 10)) for start in (0, 30, 60, 90)]
    assert held_out_windows(text, window=9, most=1000).flatten().tolist() == list(range(100))


def test_samples_are_windows_of_the_text_and_follow_the_seed():
    text = torch.arange(50, dtype=torch.uint8)
    draw = [sample(text, 200, 4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draw[0].shape == (200, 5)
    assert torch.equal(draw[0], draw[0][:, :1] + torch.arange(5, dtype=torch.uint8))
    assert (draw[0].min(), draw[0].max()) == (0, 49)
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
