"""benchmarks/floors.py: calls that are drawn at random, and their predicted floors."""

import re
import shlex

import pytest
import torch

from gla_core.bench import models
from gla_core.cli.calls import describe_call
from gla_core.dispatch.request import current_request
from gla_core.dispatch.selection import explain_call
from gla_core.workloads.models import MODELS


@pytest.fixture
def floors(script):
    return script("floors")


@pytest.mark.parametrize("name", ["GLA 1.3B", "GLA 7B", "HGRN2 1.3B", "simple GLA 1.3B"])
@pytest.mark.parametrize("way", ["forward", "backward", "step"])
def test_floors_are_those_of_the_table_of_models(floors, name, way):
    (model,) = (model for model in MODELS if model.name == name)
    (call,) = models.op_calls(model, way, torch.device("cuda"))
    assert floors.floor_seconds(call) == pytest.approx(models.floor_seconds(model, way, floors.BANDWIDTH), rel=1e-3)


def test_calls_that_fill_the_gpu(floors, capsys):
    surveyed = list(floors.survey(150, 1, "H200", ["bfloat16", "float16"]))
    assert {each.call.op for each in surveyed} >= {"chunk_gla_fwd", "chunk_ssd_bwd", "recurrent_gla_step"}
    assert all(each.floor >= floors.LEAST for each in surveyed)
    floors.main(["--calls", "150", "--seed", "1", "--dtypes", "bfloat16,float16", "--limit", "2", "--most", "1000"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(surveyed)
    assert last.startswith(f"{sum(each.floors > 2 for each in surveyed)} of {len(surveyed)} calls")
    for line in lines:
        told, op, options = re.fullmatch(r" *([0-9.]+) floors of .* us: gla explain (\w+) (.*?): .*", line).groups()
        if "with checkpoints" in line:
            continue
        words = shlex.split(options)
        named = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        named = {name: int(value) if value.isdecimal() else value for name, value in named.items()}
        call = describe_call(op, **named)
        (winner, *_) = explain_call(call, current_request("auto")).candidates
        assert winner.seconds / floors.floor_seconds(call) == pytest.approx(float(told), abs=0.006)
