"""The tables of docs/from-fla.md name every argument of flash-linear-attention's functions and of ours."""

import inspect
import re
from pathlib import Path

import pytest

import gla_core as gla
from gla_core.compat import fla
from gla_core.compat.fla.accelerate import FUNCTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "from-fla.md").read_text(encoding="utf-8")


def arguments(heading):
    """Returns the names in the first and in the second column of the table under a heading."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n#")[0]
    theirs, ours = [], []
    for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]:
        left, right = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3])
        theirs += left
        ours += left if "| the same |" in row else right
    return theirs, ours


def parameters(function):
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


# The functions of gla_core.compat.fla have exactly the arguments of flash-linear-attention's.
@pytest.mark.parametrize("function", [fla.chunk_gla, fla.fused_recurrent_gla])
def test_every_argument_of_its_functions_is_there(function):
    theirs, _ = arguments(f"`{function.__name__}`")
    assert sorted(theirs) == sorted(parameters(function))


def test_every_argument_of_delta_rules_is_there():
    theirs, ours = arguments("`chunk_kda`, `chunk_gated_delta_rule` and `chunk_delta_rule`")
    common = arguments("`chunk_gla`")
    theirs, ours = {*theirs, *common[0]}, {*ours, *common[1]}
    functions = (fla.chunk_kda, fla.chunk_gated_delta_rule, fla.chunk_delta_rule)
    assert theirs - {"A_log", "dt_bias", "chunk_size"} == {name for f in functions for name in parameters(f)}
    assert ours == set(parameters(gla.chunk_delta))


def test_every_function_is_in_the_table():
    section = PAGE.split("\n### What is covered\n")[1].split("\n#")[0]
    named = {name for name in re.findall(r"`(\w+)`", section) if hasattr(fla, name)}
    assert named - {"accelerate"} == {name for name in fla.__all__ if name in FUNCTIONS}
    assert named >= FUNCTIONS.keys()


@pytest.mark.parametrize(
    ("heading", "layer"),
    [("`GatedLinearAttention`", "GatedLinearAttention"), ("`HGRN2Attention`, here `HGRN2`", "HGRN2Attention")],
)
def test_every_argument_of_its_layers_is_there(heading, layer):
    layers = pytest.importorskip("fla.layers")
    theirs, _ = arguments(heading)
    assert sorted(theirs) == sorted(parameters(getattr(layers, layer)))


@pytest.mark.parametrize(
    ("heading", "ours"),
    [
        ("`chunk_gla`", gla.chunk_gla),
        ("`GatedLinearAttention`", gla.nn.GatedLinearAttention),
        ("`HGRN2Attention`, here `HGRN2`", gla.nn.HGRN2),
    ],
)
def test_every_argument_of_ours_is_there(heading, ours):
    _, named = arguments(heading)
    assert sorted(named) == sorted(parameters(ours))


@pytest.mark.parametrize("heading", ["`fused_recurrent_gla`", "`forward`"])
def test_what_it_names_exists(heading):
    _, named = arguments(heading)
    functions = (gla.chunk_gla, gla.nn.GatedLinearAttention.forward, gla.nn.HGRN2.forward)
    assert set(named) - {"y"} <= {name for function in functions for name in parameters(function)}
