"""The claims of the README."""

from __future__ import annotations

import inspect
import math
import re
from operator import attrgetter
from pathlib import Path

import gla_core as gla
import gla_core.distributed
from gla_core.dispatch.backend import OP_PARAMETERS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def section(heading):
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def test_the_quickstart_has_ten_lines():
    quickstart = re.search(r"```python\n(.*?)```", section("Quickstart"), re.DOTALL)
    assert quickstart is not None
    assert len(list(filter(str.strip, quickstart[1].splitlines()))) == 10


def test_the_readme_is_read_in_one_go():
    assert len(README.splitlines()) <= 220


def test_the_gain_it_claims_is_in_its_table():
    table = re.search(r"^\| `chunk_gla` .*?(?=^\| Mamba-2)", README, re.MULTILINE | re.DOTALL)
    assert table, "the table has no row of chunk_gla"
    ratios = [float(ratio) for ratio in re.findall(r"\*\*([\d.]+)\s×\*\*", table[0])]
    (least, most) = map(int, re.findall(r"the op is (\d+) to (\d+) times as fast", README)[0])
    assert least <= min(ratios)
    assert most == math.floor(max(ratios))


def test_its_functions_take_what_it_says():
    calls = re.findall(r"`(gla[\w.]*)\(([^)`]*)\)`", section("Functions and backends"))
    for name, arguments in calls:
        called = attrgetter(name.split(".", 1)[1])(gla)
        taken = list(inspect.signature(called).parameters)
        passed = arguments.split(", ")
        assert taken[: len(passed)] == passed, name
    functions = {name: getattr(gla, name) for name in gla.__all__ if inspect.isfunction(getattr(gla, name))}
    ops = {name for name, function in functions.items() if function.__module__.startswith("gla_core.ops.")}
    assert "chunk_gla" in ops
    assert {f"gla.{name}" for name in ops} <= {name for name, _ in calls}


def test_it_names_the_abstract_ops():
    sentence = re.search(r"The abstract ops are (.*?)\.", section("Add a backend"), re.DOTALL)
    assert sentence is not None
    assert re.findall(r"`(\w+)`", sentence[1]) == list(OP_PARAMETERS)


def test_each_of_its_backends_implements_every_op(own_backends):
    described = re.findall(r"^- `(\w+)` ", section("Functions and backends"), re.MULTILINE)
    assert sorted(described) == own_backends
    assert all(set(b.ops) == set(OP_PARAMETERS) for b in gla.backends() if b.name in described)
