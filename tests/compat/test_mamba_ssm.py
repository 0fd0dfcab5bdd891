"""mamba_ssm's functions against Mamba-2's recurrence, token by token in float64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gla_core as gla
from gla_core.compat.mamba_ssm import mamba_chunk_scan_combined, ops, selective_state_update

WIDE = torch.float64


def recurrence(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, dt_softplus=False, dt_limit=None
):
    """Returns the outputs and the states after every token [batch, seqlen, nheads, headdim, dstate]."""
    heads = x.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    dt = dt.clamp(*(dt_limit or (0, torch.inf)))
    B, C = (y.repeat_interleave(heads // y.shape[2], 2) for y in (B, C))
    S = x.new_zeros(len(x), heads, x.shape[3], B.shape[3]) if initial_states is None else initial_states
    states, before = [S], torch.zeros(len(x), dtype=torch.int32)
    for t in range(x.shape[1]):
        if seq_idx is not None:
            S = S * (seq_idx[:, t] == before)[:, None, None, None]
            before = seq_idx[:, t]
        S = (dt[:, t] * A).exp()[..., None, None] * S + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        states.append(S)
    S = torch.stack(states, 1)
    y = torch.einsum("bthpn,bthn->bthp", S[:, 1:], C)
    y = y if D is None else y + x * (D[:, None] if D.ndim == 1 else D)
    return y if z is None else y * F.silu(z), S


@dataclasses.dataclass
class Inputs:
    """Arguments of the scan: the tensors that have gradients, and all others."""

    tensors: dict
    others: dict

    def leaves(self):
        return {name: x.detach().clone().requires_grad_() for name, x in self.tensors.items()}


def inputs(batch=2, T=9, heads=4, groups=2, P=3, N=5, optional=("D", "z", "dt_bias", "initial_states"), **others):
    def rand(*shape):
        return torch.randn(*shape, dtype=WIDE, generator=generator)

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "x": rand(batch, T, heads, P),
        "dt": rand(batch, T, heads),
        "A": -rand(heads).exp(),
        "B": rand(batch, T, groups, N),
        "C": rand(batch, T, groups, N),
        "D": rand(heads),
        "z": rand(batch, T, heads, P),
        "dt_bias": rand(heads),
        "initial_states": rand(batch, heads, P, N),
    }
    more = {name: tensors.pop(name) for name in ("D", "z", "dt_bias", "initial_states")}
    if "wide D" in optional:
        tensors["D"] = rand(heads, P)
    return Inputs(tensors | {name: more[name] for name in optional if name in more}, {"dt_softplus": True} | others)


def check(case):
    """Compares outputs, final states and gradients with the recurrence."""
    leaves = case.leaves()
    actual = mamba_chunk_scan_combined(**leaves, chunk_size=4, return_final_states=True, **case.others)
    y, S = recurrence(**leaves, **case.others)
    expected = (y, S[:, -1])
    weights = [torch.linspace(-1, 1, r.numel(), dtype=WIDE).view(r.shape) for r in expected]
    torch.testing.assert_close(actual, expected)
    compare_gradients(actual, expected, weights, leaves)


def compare_gradients(actual, expected, weights, leaves):
    a, b = (
        torch.autograd.grad(results, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
        for results in (actual, expected)
    )
    for name, x, y in zip(leaves, a, b, strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize(
    "optional",
    [(), ("D",), ("wide D", "z"), ("z",), ("dt_bias",), ("initial_states",), ("D", "z", "dt_bias", "initial_states")],
    ids="+".join,
)
def test_every_option_alone_and_together(optional):
    check(inputs(optional=optional))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize("T", [1, 67, 130])
def test_groups_and_odd_lengths(T, heads, groups):
    check(inputs(batch=1, T=T, heads=heads, groups=groups))


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.9)])
def test_time_steps_are_clamped_after_softplus(softplus, limit):
    check(inputs(dt_softplus=softplus, dt_limit=limit))


@pytest.mark.parametrize("first", [0, 3])
def test_sequences_in_a_row(first):
    """The state restarts where the index changes; only a row that begins with index 0 reads its initial state."""
    T = 70
    seq_idx = torch.stack([(torch.arange(T) >= 66) * 2 + first, torch.arange(T) // 7]).int()
    check(inputs(T=T, seq_idx=seq_idx))
    check(inputs(T=T, seq_idx=seq_idx, optional=()))


def packed(lengths):
    """Returns seq_idx [1, T] and cu_seqlens of sequences."""
    lengths = torch.tensor(lengths)
    return lengths.new_tensor(range(len(lengths))).repeat_interleave(lengths)[None], F.pad(lengths.cumsum(0), (1, 0))


@pytest.mark.parametrize("lengths", [(9,), (3, 66, 1), (0, 4, 0, 5, 0)], ids=str)
@pytest.mark.parametrize("final", [False, True])
def test_states_of_packed_sequences(lengths, final):
    seq_idx, offsets = packed(lengths)
    x = inputs(batch=1, T=sum(lengths), seq_idx=seq_idx)
    leaves = x.leaves()
    actual = mamba_chunk_scan_combined(
        **leaves, **x.others, chunk_size=4, cu_seqlens=offsets, return_final_states=final, return_varlen_states=True
    )
    y, S = recurrence(**leaves, **x.others)
    ends = [S[0, end] if end > start else S[0, 0] * (i == 0) for i, (start, end) in enumerate(offsets.unfold(0, 2, 1))]
    expected = (y, S[:, -1], torch.stack(ends)) if final else (y, torch.stack(ends))
    torch.testing.assert_close(actual, expected)
    compare_gradients(actual, expected, [torch.ones_like(r) for r in expected], leaves)


def test_offsets_alone_change_nothing():
    x = inputs(batch=1)
    out = mamba_chunk_scan_combined(**x.tensors, **x.others, chunk_size=4, cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(out, recurrence(**x.tensors, **x.others)[0])


@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_random_calls(data):
    T, groups = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 3))
    optional = data.draw(st.sets(st.sampled_from(["D", "wide D", "z", "dt_bias", "initial_states"])))
    others = {
        "dt_softplus": data.draw(st.booleans()),
        "dt_limit": data.draw(st.sampled_from([(0.0, torch.inf), (0.1, 1.0)])),
    }
    batch = data.draw(st.integers(1, 2))
    if data.draw(st.booleans()):
        changes = data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=batch, max_size=batch))
        others["seq_idx"] = torch.tensor(changes).cumsum(1)
    check(inputs(batch, T, groups * data.draw(st.integers(1, 3)), groups, optional=tuple(optional), **others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    x = inputs(T=40)
    tensors = {name: t.to(torch.float32 if name in ("A", "D", "dt_bias") else dtype) for name, t in x.tensors.items()}
    out, final = mamba_chunk_scan_combined(**tensors, chunk_size=4, return_final_states=True, **x.others)
    y, S = recurrence(**{name: t.double() for name, t in tensors.items()}, **x.others)
    assert (out.dtype, final.dtype) == (dtype, torch.float32)
    tolerance = 8 * torch.finfo(dtype).eps  # a few roundings of each term
    for a, b in ((out, y), (final, S[:, -1])):
        assert (a - b).norm() <= tolerance * b.norm()


def test_it_compiles_without_graph_breaks():
    seq_idx, offsets = packed((3, 6))
    x = inputs(batch=1, seq_idx=seq_idx, cu_seqlens=offsets, return_varlen_states=True, return_final_states=True)

    def call(tensors):
        return mamba_chunk_scan_combined(**tensors, chunk_size=4, **x.others)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.tensors), call(x.tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 9, 4)}, r"x has shape \[2, 9, 4\]; expected \[batch, seqlen, nheads, headdim\]"),
        ({"dt": torch.zeros(2, 9, 3)}, r"dt has shape \[2, 9, 3\]; expected \[batch, seqlen, nheads\] with"),
        ({"A": torch.zeros(4, 5)}, r"A has shape \[4, 5\]; expected \[nheads\]"),
        ({"C": torch.zeros(2, 9, 1, 5)}, r"C has shape .* with .*ngroups=2"),
        ({"B": torch.zeros(2, 9, 3, 5), "C": torch.zeros(2, 9, 3, 5)}, "B has 3 groups; expected a divisor of"),
        ({"D": torch.zeros(4, 2)}, r"D has shape \[4, 2\]; expected \[nheads, headdim\]"),
        ({"dt_limit": (-1.0, 1.0)}, r"dt_limit is \(-1.0, 1.0\); expected two numbers, the first at least 0"),
        ({"return_varlen_states": True}, "cu_seqlens is None; return_varlen_states needs both"),
        ({"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 9])}, "seq_idx is None"),
        (
            {"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 9]), "seq_idx": torch.zeros(2, 9)},
            "x has batch = 2; return_varlen_states takes sequences packed in one row",
        ),
    ],
)  # fmt: skip
def test_what_the_scan_refuses(changes, message):
    x = inputs()
    with pytest.raises(ValueError, match=message):
        mamba_chunk_scan_combined(**(x.tensors | x.others | changes), chunk_size=4)


def test_x_of_integers_is_refused():
    x = inputs()
    with pytest.raises(TypeError, match="x is int64; expected float64 or"):
        mamba_chunk_scan_combined(**(x.tensors | {"x": x.tensors["x"].long()}), chunk_size=4)


def tokens(x, expanded=True):
    """Returns the arguments of one step for each token, made as mamba_ssm's Mamba-2 layer makes them."""
    (P, N), heads = (x["x"].shape[3], x["B"].shape[3]), x["x"].shape[2]
    for t in range(x["x"].shape[1]):
        step = {name: x[name][:, t] for name in ("x", "B", "C", "z")}
        step["dt"] = x["dt"][:, t, :, None].expand(-1, -1, P)
        step["A"] = x["A"][:, None, None].expand(heads, P, N)
        step["dt_bias"], step["D"] = (x[name][:, None].expand(heads, P) for name in ("dt_bias", "D"))
        yield step if expanded else {name: y.contiguous() for name, y in step.items()}


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1)])
def test_steps_equal_the_scan(heads, groups, expanded):
    x = inputs(heads=heads, groups=groups)
    out, final = mamba_chunk_scan_combined(**x.tensors, chunk_size=4, return_final_states=True, **x.others)
    state = x.tensors["initial_states"].clone()
    for t, step in enumerate(tokens(x.tensors, expanded)):
        torch.testing.assert_close(selective_state_update(state, **step, dt_softplus=True), out[:, t])
    torch.testing.assert_close(state, final)


def test_a_gate_for_each_head_is_recognized(monkeypatch):
    shapes, ssd_step, step = [], ops.recurrent_ssd_step, ops.recurrent_gla_step
    monkeypatch.setattr(ops, "recurrent_ssd_step", lambda *x, **y: shapes.append(y["dt"].shape) or ssd_step(*x, **y))
    monkeypatch.setattr(ops, "recurrent_gla_step", lambda *x, **y: shapes.append(x[3].shape) or step(*x, **y))
    x = inputs().tensors
    for expanded in (True, False):
        selective_state_update(x["initial_states"].clone(), **next(tokens(x, expanded)))
    assert [list(shape) for shape in shapes] == [[2, 4], [2, 12, 5]]


@pytest.mark.parametrize("request_", ["reference", "parallel_scan", "batch_invariant=64"])
def test_a_step_honours_requests(request_):
    x = inputs(T=1).tensors
    state, (expected, after) = x["initial_states"].clone(), recurrence(**x, dt_softplus=True)
    with gla.use_backend(request_):
        torch.testing.assert_close(selective_state_update(state, **next(tokens(x)), dt_softplus=True), expected[:, 0])
    torch.testing.assert_close(state, after[:, -1])


def test_a_step_compiles_without_graph_breaks():
    x = inputs().tensors
    step, states = next(tokens(x)), [x["initial_states"].clone() for _ in range(2)]
    compiled = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(states[0], **step), selective_state_update(states[1], **step))
    torch.testing.assert_close(*states)


def mamba1(state, x, dt, A, B, C, D, z, dt_bias):
    """Returns the output and the new state of a step in which every channel and key has its own rate."""
    dt = F.softplus(dt + dt_bias)
    R = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(R, 1)[:, :, None], C.repeat_interleave(R, 1)[:, :, None]
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B
    return ((state * C).sum(-1) + D * x) * F.silu(z), state


def mamba1_inputs(batch=3, pool=3, heads=4, groups=2, P=3, N=5):
    torch.manual_seed(0)
    shapes = {
        "x": (batch, heads, P),
        "dt": (batch, heads, P),
        "A": (heads, P, N),
        "B": (batch, groups, N),
        "C": (batch, groups, N),
        "D": (heads, P),
        "z": (batch, heads, P),
        "dt_bias": (heads, P),
    }
    step = {name: torch.randn(shape, dtype=WIDE) for name, shape in shapes.items()}
    return torch.randn(pool, heads, P, N, dtype=WIDE), step | {"A": -step["A"].exp()}


def test_rates_of_each_channel_and_key():
    state, step = mamba1_inputs()
    expected, after = mamba1(state, **step)
    torch.testing.assert_close(selective_state_update(state, **step, dt_softplus=True), expected)
    torch.testing.assert_close(state, after)


def test_without_heads():
    state, step = mamba1_inputs(heads=1, groups=1)
    expected, after = mamba1(state, **step)
    axis = {"A": 0, "D": 0, "dt_bias": 0}
    flat, state = {name: y.squeeze(axis.get(name, 1)) for name, y in step.items()}, state.squeeze(1)
    torch.testing.assert_close(selective_state_update(state, **flat, dt_softplus=True), expected.squeeze(1))
    torch.testing.assert_close(state, after.squeeze(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pool_of_states(tied, dtype):
    """Rows read and write the states that they name; a negative index names none. float32 states are copied here."""
    state, step = mamba1_inputs(batch=3, pool=5)
    if tied:
        step["A"] = step["A"][:, :1, :1].expand_as(step["A"])
        step["dt"], step["dt_bias"] = (step[name][..., :1].expand_as(step[name]) for name in ("dt", "dt_bias"))
    state = state.to(dtype)
    before, rows = state.clone(), torch.tensor([3, -1, 0])
    out = selective_state_update(state, **step, dt_softplus=True, state_batch_indices=rows)
    expected, after = mamba1(before[rows].double(), **step)
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(state[[3, 0]], after[[0, 2]].to(dtype))
    assert torch.equal(state[[1, 2, 4]], before[[1, 2, 4]])
    assert not out[1].any()  # as in mamba_ssm


def test_states_of_half_precision():
    state, step = mamba1_inputs()
    step = {name: y.half() for name, y in step.items()}
    state = state.half()
    expected, after = mamba1(state.double(), **{name: y.double() for name, y in step.items()})
    out = selective_state_update(state, **step, dt_softplus=True)
    assert out.dtype == state.dtype == torch.float16
    torch.testing.assert_close(out, expected.half(), atol=0.02, rtol=0.004)  # v and the output are rounded
    torch.testing.assert_close(state, after.half(), atol=0.004, rtol=0.002)


def test_what_a_step_refuses():
    state, step = mamba1_inputs()
    with pytest.raises(ValueError, match=r"dt has shape \[3, 2, 3\]; expected \[batch, nheads, dim\] with"):
        selective_state_update(state, **(step | {"dt": step["dt"][:, :2]}))
    with pytest.raises(ValueError, match=r"state has strides .*; expected heads and channels that follow each other"):
        selective_state_update(state.transpose(1, 2).contiguous().transpose(1, 2), **step)
    with pytest.raises(ValueError, match="state has stride 0 along dimension 3 of size 5 and is written in place"):
        selective_state_update(state[..., :1].expand_as(state), **next(tokens(inputs(batch=3).tensors)))
    with pytest.raises(RuntimeError, match="no backward"):
        selective_state_update(state, **(step | {"x": step["x"].requires_grad_()}))
