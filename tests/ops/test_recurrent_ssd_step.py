"""recurrent_ssd_step: what it refuses, its gradient, and the step of a backend."""

import re

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, Capabilities
from gla_core.ops import ABSTRACT_OPS
from tests.ops import serving
from tests.ops.serving import assert_computed, expected, keyword_only_step, plain_step

SSD_STEP = "recurrent_ssd_step"
ones = torch.ones


def arguments(sizes=None, **changes):
    return serving.arguments(SSD_STEP, {"B": 2, "H": 2, "R": 2, "K": 5, "V": 3, **(sizes or {})}, **changes)


@pytest.mark.parametrize("step", [plain_step, keyword_only_step])
@pytest.mark.parametrize("tokens", [0, 64])
def test_a_backend_with_a_step_serves_it(step, tokens):
    """With inputs of half precision too, the step receives float32: values and outputs are rounded once."""
    can = Capabilities(grouped_values=True, gates=frozenset({"head"}))
    with gla.register(Backend("mine", "0", {"recurrent_gla_step": step}, can)), gla.batch_invariant(tokens):
        for sizes in ({}, {"rows": (3, 9), "pool": 4, "dt_softplus": True}):
            x = arguments(sizes)
            wanted = expected(SSD_STEP, x)
            assert_computed(SSD_STEP, gla.recurrent_ssd_step(**x, backend="mine"), x, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [None, (3, 1)])
def test_a_prepared_part_is_described_as_its_own_call_would_be(dtype, rows):
    spec, x = ABSTRACT_OPS[SSD_STEP], arguments({"dtype": dtype, "rows": rows, "pool": 4 if rows else None})
    ((described, times),) = spec.lowering.parts(spec.describe(*spec.complete((), {**x, "scale": 1.0})))
    part, dense = ABSTRACT_OPS[spec.lowering.by], {name: x[name].float().contiguous() for name in "qkv"}
    options = {"state": x["state"], "scale": 1.0, "state_indices": x["slots"], "inplace": True}
    assert described == part.describe(*part.complete((), {**dense, "g": torch.zeros(2, 4), **options}))
    assert times == 1


BAD = [
    ({"q": ones(2, 4, 5)}, ValueError, "k has shape [2, 2, 5]; expected [B, H, K] with B=2, H=4, K=5"),
    ({"v": ones(2, 3, 3)}, ValueError, "dt has shape [2, 4]; expected [B, Hv] with B=2, Hv=3"),
    ({"v": ones(2, 3, 3), "dt": ones(2, 3), "A": ones(3), "dt_bias": None, "D": None, "z": None},
     ValueError, "v has 3 heads; expected a multiple of q's 2"),
    ({"v": ones(2, 4, 3).half()}, TypeError, "v is float16; expected float32, as q"),
    ({"state": ones(3, 4, 5, 3)}, ValueError, "state has shape [3, 4, 5, 3]; expected [P, Hv, K, V] with P=2"),
    ({"state": ones(2, 4, 5, 1).expand(-1, -1, -1, 3)}, ValueError, "state has stride 0 along dimension 3 of size 3"),
    ({"dt": ones(2, 2)}, ValueError, "dt has shape [2, 2]; expected [B, Hv] with B=2, Hv=4"),
    ({"dt": None}, TypeError, "dt is NoneType; expected a tensor"),
    ({"A": ones(4, 1)}, ValueError, "A has shape [4, 1]; expected [Hv]"),
    ({"A": ones(4).double()}, TypeError, "A is float64; expected float32, as q or float32"),
    ({"dt_bias": ones(2)}, ValueError, "dt_bias has shape [2]; expected [Hv] with Hv=4"),
    ({"D": ones(4, 3)}, ValueError, "D has shape [4, 3]; expected [Hv]"),
    ({"z": ones(2, 4, 1)}, ValueError, "z has shape [2, 4, 1]; expected [B, Hv, V]"),
    ({"dt_softplus": 1}, TypeError, "dt_softplus is int; expected True or False"),
    ({"slots": torch.zeros(2)}, TypeError, "slots is float32; expected int32 or int64"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_refused_with_a_message_before_anything_is_written(changes, error, message):
    x = arguments(**changes)
    before = x["state"].clone()
    with pytest.raises(error, match=re.escape(message)):
        gla.recurrent_ssd_step(**x)
    assert torch.equal(x["state"], before)


@pytest.mark.parametrize("name", ["v", "state", "dt", "A", "D"])
def test_it_has_no_backward(name):
    x = arguments()
    x[name].requires_grad_()
    message = f"{SSD_STEP} has no backward and an input requires a gradient; train with chunk_gla"
    with pytest.raises(RuntimeError, match=message):
        gla.recurrent_ssd_step(**x)
    with torch.no_grad():
        gla.recurrent_ssd_step(**x)
