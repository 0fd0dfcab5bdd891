"""The arguments of published models' calls are those that FLA's own functions take."""

import inspect

import pytest
import torch

from gla_core.bench import models
from gla_core.workloads import model_inputs
from gla_core.workloads.models import FUNCTIONS, MODELS, reduced

pytest.importorskip("fla")

EACH = {model.function: model for model in MODELS if FUNCTIONS[model.function].peer == "fla"}


@pytest.mark.parametrize("model", EACH.values(), ids=EACH)
def test_fla_takes_the_arguments(model):
    called = reduced(model), torch.device("cpu"), torch.float32
    for step in (False, True):
        made = model_inputs.step_arguments(*called) if step else model_inputs.arguments(*called)
        passed = {*made, *model_inputs.OPTIONS.get(model.function, {})}
        parameters = inspect.signature(models._function(model, "fla", step)).parameters.values()
        assert passed <= {x.name for x in parameters}
        needed = {x.name for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD}
        assert needed <= passed
