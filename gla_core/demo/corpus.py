"""The text to learn from: the source files of Python's standard library, or the files of a folder."""

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

# Tests repeat themselves, and these packages hold tables rather than programs.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "idlelib"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text, split by file where there are enough, so that nothing held out has been seen in part.

    Attributes:
        train, held_out: bytes [n] uint8, the files one after another.
        train_files, held_out_files: where they come from.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]

    def sha256(self) -> str:
        """The first 16 digits of the SHA-256 of all of the text."""
        known = hashlib.sha256()
        for text in (self.train, self.held_out):
            known.update((ctypes.c_ubyte * len(text)).from_address(text.data_ptr()))  # needs no NumPy, and no copy
        return known.hexdigest()[:16]


def standard_library() -> Corpus:
    """The standard library of the Python that runs. Raises FileNotFoundError where it came without its sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = source_files(root)
    if len(files) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(f"{root} holds {len(files)} source files; the demo needs a Python with its sources")
    return load(files)


def folder(root: Path) -> Corpus:
    """The text files under a folder; of fewer than 40 files the last twentieth of each is held out.

    Raises FileNotFoundError where there are none.
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
    """The files under root that hold text and are not hidden, in an order that does not depend on the file system."""
    found = (path for path in root.rglob("*") if path.is_file())
    shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return sorted(path for path in shown if _is_text(path))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8000)  # as git tells


def source_files(root: Path) -> list[Path]:
    """The .py files under root that are worth reading, in an order that does not depend on the file system."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]  # not even walked: site-packages may be large
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


def load(files: list[Path]) -> Corpus:
    """Read files; every 20th, beginning with the first, is held out."""
    held_out = tuple(files[::HELD_OUT_EVERY])
    train = tuple(path for i, path in enumerate(files) if i % HELD_OUT_EVERY)
    return Corpus(_read(train), _read(held_out), train, held_out)


def _read(files: tuple[Path, ...]) -> Tensor:
    text = bytearray().join(path.read_bytes() for path in files)
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
