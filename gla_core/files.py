"""Writes files of results in one step, and checks before the work that they can be written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def check_writable(option: str, path: Path, folder: bool = False) -> None:
    """Raises ValueError unless a file, or files in a folder, can be written at `path`; leaves nothing behind.

    Args:
        option: the command-line option that names the path, for the message.
        folder: whether `path` is a folder, which need not exist yet.
    """
    try:
        if not folder and path.is_dir():
            raise ValueError(f"{option} {path} is a folder; name a file")
        if path.exists() and not (path.is_dir() if folder else path.is_file()):
            raise ValueError(f"{option} {path} is no {'folder' if folder else 'regular file'}; name another path")
        if path.is_file():
            path.open("ab").close()
        place = path.absolute() if folder else path.absolute().parent
        tempfile.TemporaryFile(dir=next(p for p in (place, *place.parents) if p.exists())).close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; name another path") from None


def write_json(target: Path, value: object) -> None:
    """Writes a JSON file in one step: a reader finds the old file or the new one, never half of one.

    Args:
        value: the JSON value; an object in a list of its fields gets a line of its own, such as one of `rows`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(_json(value) + "\n")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _json(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value, indent=1)
    fields = (f" {json.dumps(name)}: {_field(field)}" for name, field in value.items())
    return "{\n" + ",\n".join(fields) + "\n}"


def _field(value: object) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(x, dict) for x in value):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value, indent=1).replace("\n", "\n ")
