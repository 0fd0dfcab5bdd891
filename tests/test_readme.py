"""Every Python block of the README and of docs/ runs, and the names and links that they give are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gla_core as gla
from gla_core.dispatch.backend import OP_PARAMETERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
BLOCKS = [
    pytest.param(block, id=f"{page} block {i}")
    for page, text in PAGES.items()
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block):
    exec(compile(block, "a page", "exec"), {})


def test_the_quickstart_has_ten_lines():
    quickstart = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert quickstart is not None
    assert len(list(filter(str.strip, quickstart[1].splitlines()))) == 10


def test_the_readme_is_read_in_one_go():
    assert len(README.splitlines()) <= 200


def test_the_table_of_ops_is_the_contract(own_backends):
    (header,) = re.findall(r"^\| abstract op \|.*$", README, re.MULTILINE)
    columns = re.findall(r"`(\w+)`", header)
    assert sorted(columns) == own_backends
    rows = re.findall(r"^\| `(\w+)` \|.*?((?: \| (?:yes|no))+) \|$", README, re.MULTILINE)
    assert [op for op, _ in rows] == list(OP_PARAMETERS)
    ops = {b.name: b.ops for b in gla.backends()}
    for op, cells in rows:
        assert cells.split(" | ")[1:] == ["yes" if op in ops[name] else "no" for name in columns], op


@pytest.mark.parametrize("page", PAGES)
def test_the_files_it_names_exist(page):
    named = re.findall(
        r"(?<![\w/])((?:gla_core|backends|benchmarks|tests|plugins)/[\w/]+(?:\.py|\.json|/))", PAGES[page]
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) if not re.match(r"\w+:|#", link)]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
