"""Whether a file can be written, asked before the work whose results it is to hold."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_writable(option: str, path: Path, folder: bool = False) -> None:
    """Raise ValueError unless a file, or files in a folder, can be written at `path`; leaves nothing behind.

    Args:
        option: the command-line option that names the path, for the message.
        folder: `path` is a folder, which need not exist yet.
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
