"""The text of the demo: the source files of Python's standard library, or the files of a folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_EVERY = 20

# Tests repeat themselves, and these packages hold tables and not programs.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "idlelib"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, split into training files and held-out files; a small folder is split within each file.

    Attributes:
        train, held_out: bytes [n] uint8, the files one after another.
        train_files, held_out_files: the paths of these files.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]

    def sha256(self) -> str:
        """Returns the first 16 digits of the SHA-256 of the whole text."""
        known = hashlib.sha256()
        for text in (self.train, self.held_out):
            known.update((ctypes.c_ubyte * len(text)).from_address(text.data_ptr()))  # needs no NumPy, and no copy
        return known.hexdigest()[:16]


def standard_library() -> Corpus:
    """Returns the standard library of the running Python. Raises FileNotFoundError if its sources are not installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files = source_files(root)
    if len(files) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(f"{root} holds {len(files)} source files; the demo needs a Python with its sources")
    return load(files)


def folder(root: Path) -> Corpus:
    """Returns the text files under a folder; with fewer than 40 files, the last twentieth of each file is held out.

    Raises FileNotFoundError if there are none.
    """
    files = text_files(root)
    if not files:
        raise FileNotFoundError(f"{root} is no folder with text files in it; hidden and binary ones do not count")
    if len(files) >= 2 * HELD_OUT_EVERY:
        return load(files)
    texts = [_read((path,)) for path in files]
    split = [text.tensor_split([len(text) - len(text) // HELD_OUT_EVERY]) for text in texts]
    train, held_out = (torch.cat(parts) for parts in zip(*split, strict=True))
    return Corpus(train, held_out, tuple(files), tuple(files))


def text_files(root: Path) -> list[Path]:
    """Returns the files under root that hold text and are not hidden, sorted."""
    paths = (path for path in root.rglob("*") if path.is_file())
    shown = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return sorted(path for path in shown if _is_text(path))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8000)  # git's rule for binary files


def source_files(root: Path) -> list[Path]:
    """Returns the .py files under root without tests and tables, sorted."""
    paths: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]  # not searched at all: site-packages may be large
        paths += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(paths)


def load(files: list[Path]) -> Corpus:
    """Reads files; every 20th file, beginning with the first, is held out."""
    held_out = tuple(files[::HELD_OUT_EVERY])
    train = tuple(path for i, path in enumerate(files) if i % HELD_OUT_EVERY)
    return Corpus(_read(train), _read(held_out), train, held_out)


def _read(files: tuple[Path, ...]) -> Tensor:
    text = bytearray().join(path.read_bytes() for path in files)
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8, device="cpu")
