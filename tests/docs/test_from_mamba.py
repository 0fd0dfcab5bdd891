"""The tables of docs/from-mamba.md name every argument of mamba_ssm's functions, and arguments of ours that exist."""

import inspect
import re
from pathlib import Path

import pytest

import gla_core as gla
from gla_core.compat import mamba_ssm

PAGE = (Path(__file__).parents[2] / "docs" / "from-mamba.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(mamba_ssm.mamba_chunk_scan_combined, gla.chunk_ssd), (mamba_ssm.selective_state_update, gla.recurrent_ssd_step)],
)
def test_the_tables_name_the_arguments(theirs, ours):
    section = PAGE.split(f"\n### `{theirs.__name__}`\n")[1].split("\n#")[0]
    rows = [row.split("|") for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]]
    left, right = (" ".join(row[column] for row in rows) for column in (1, 2))
    assert sorted(re.findall(r"`(\w+)`", left)) == sorted(inspect.signature(theirs).parameters)
    assert set(re.findall(r"`(\w+)`", right)) <= set(inspect.signature(ours).parameters)
