"""Every Python block of the README runs, and the names it gives are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gla_core as gla
from gla_core.dispatch.backend import OP_PARAMETERS

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {})


def test_the_quickstart_has_ten_lines():
    assert len(list(filter(str.strip, BLOCKS[0].splitlines()))) == 10


def test_the_table_of_ops_is_the_contract(own_backends):
    (header,) = re.findall(r"^\| abstract op \|.*$", README, re.MULTILINE)
    columns = re.findall(r"`(\w+)`", header)
    assert sorted(columns) == own_backends
    rows = re.findall(r"^\| `(\w+)` \|.*?((?: \| (?:yes|no))+) \|$", README, re.MULTILINE)
    assert [op for op, _ in rows] == list(OP_PARAMETERS)
    ops = {b.name: b.ops for b in gla.backends()}
    for op, cells in rows:
        assert cells.split(" | ")[1:] == ["yes" if op in ops[name] else "no" for name in columns], op


def test_the_files_it_names_exist():
    root = Path(__file__).parents[1]
    for path in re.findall(r"\b((?:gla_core|backends)/[\w/]+(?:\.py|/))", README):
        assert (root / path).exists(), path
