"""Files of results are checked before the work, and written in one step."""

import json
import re

import pytest

from gla_core.files import check_writable, write_json


def test_what_can_be_written_is_accepted_and_nothing_is_left_behind(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("as before")
    for path in (there, tmp_path / "new.json", tmp_path / "new" / "folder" / "new.json"):
        check_writable("--json", path)
    for path in (tmp_path, tmp_path / "new" / "folder"):
        check_writable("--plot", path, folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "as before"


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("folder", False, "is a folder; name a file"),
        ("file", True, "is no folder; name another path"),
        ("file/below", False, "cannot be written: Not a directory; name another path"),
        ("file/below/folder", True, "cannot be written: Not a directory; name another path"),
        ("x" * 300, False, "cannot be written: File name too long; name another path"),
        ("/dev/null", False, "is no regular file; name another path"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, name, folder, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{re.escape(f'--json {tmp_path / name} {message}')}$"):
        check_writable("--json", tmp_path / name, folder)


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({"a": 1, "rows": [{"x": 1.5, "y": {"rows": []}}, {"x": None}], "b": [2]}, 10),
        ({"rows": [3, "four"]}, 6),
        ({"rows": []}, 3),
        ({"rows": "few"}, 3),
        ([1, 2], 4),
        (None, 1),
    ],
)
def test_rows_are_written_a_row_a_line(tmp_path, value, lines):
    path = tmp_path / "new" / "found.json"
    for _ in range(2):  # the second time over the first file
        write_json(path, value)
        assert json.loads(path.read_text()) == value
        assert len(path.read_text().splitlines()) == lines
    assert list(path.parent.iterdir()) == [path]
