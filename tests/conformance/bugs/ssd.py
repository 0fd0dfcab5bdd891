"""Bugs in Mamba-2's scan."""

from types import SimpleNamespace

import torch.nn.functional as F

from gla_core.ops.gla.chunk_ssd import values_and_gates
from tests.conformance.bugs.chunk_gla import forward
from tests.conformance.bugs.plant import Op

ssd = Op("chunk_ssd_fwd", "o", "state", "checkpoints")
ssd_backward = Op("chunk_ssd_bwd", "dq", "dk", "dx", "ddt", "dA", "dD", "ddt_bias", "dinitial_state")


@ssd.bug("test_values[short-float32]", over={"o"})
def skip_added_twice(x):
    return ssd(x, D=None if x.D is None else 2 * x.D)


def with_o(y, change):
    """Returns the results y with a function of o in place of o."""
    return SimpleNamespace(**{**vars(y), "o": change(y.o)})


def ssd_by_chunk_gla(x, v_of=lambda v: v, bias_of_gates=True):
    """Returns the results of chunk_ssd_fwd by chunk_gla_fwd, with other values or gates."""
    steps = (x.dt_softplus, x.dt_min, x.dt_max)
    v, g = values_and_gates(x.x, x.dt, x.A, x.dt_bias, *steps)
    g = g if bias_of_gates else values_and_gates(x.x, x.dt, x.A, None, *steps)[1]
    sequences = {name: getattr(x, name) for name in ("initial_state", "output_final_state", "cu_seqlens")}
    options = {"scale": 1.0, "checkpoint_every": x.checkpoint_every, "gate_normalizer": None}
    y = forward(SimpleNamespace(q=x.q, k=x.k, v=v_of(v), g=g, **sequences, **options))
    skip = ssd(x).o - ssd(x, D=None).o  # 0 in rows of no sequence
    y.o = y.o + skip.to(y.o.dtype)
    return y


@ssd.bug("test_values[short-float32]", over={"o", "state"})
def time_step_left_out_of_values(x):
    return ssd_by_chunk_gla(x, v_of=lambda v: x.x.contiguous())


@ssd.bug("test_values[short-float32]", over={"o", "state"})
def bias_left_out_of_the_gates(x):
    return ssd_by_chunk_gla(x, bias_of_gates=False)


@ssd.bug("test_padding[padded-float32]")
def skip_of_padding(x):
    y = ssd(x, D=None)
    y.o = y.o if x.D is None else y.o + (x.x * (x.D[:, None] if x.D.ndim == 1 else x.D)).to(y.o.dtype)
    return y


ssd.bugs(
    "test_values[gated-float32]",
    over={"o"},
    output_gate_without_silu=lambda x: with_o(ssd(x, z=None), lambda o: o if x.z is None else o * x.z),
    output_gate_before_the_skip=lambda x: with_o(
        ssd(x, D=None), lambda o: o + ssd(x, z=None).o - ssd(x, D=None, z=None).o
    ),
    output_gate_left_out=lambda x: ssd(x, z=None),
)
ssd.bugs(
    "test_padding[gated_padded-float32]",
    output_gate_of_padding=lambda x: with_o(ssd(x, z=None), lambda o: o if x.z is None else o * F.silu(x.z)),
)


@ssd_backward.bug("test_gradients[odd_widths-float32]", over={"ddt", "ddt_bias"})
def gradient_of_clamped_time_steps(x):
    d, unlimited = ssd_backward(x), ssd_backward(x, dt_min=0.0, dt_max=float("inf"))
    d.ddt, d.ddt_bias = unlimited.ddt, unlimited.ddt_bias
    return d


@ssd_backward.bug("test_gradients[short-float32]", over={"dx"})
def skip_left_out_of_the_gradient(x):
    d = ssd_backward(x)
    d.dx = ssd_backward(x, D=None).dx
    return d
