"""The functions of `fla.ops.gla`, called as in flash-linear-attention."""

import pytest
import torch

import gla_core as gla
from gla_core.compat import fla
from gla_core.conformance import oracle


def inputs(T=9, Hq=2, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, T, h, d, dtype=dtype) for h, d in ((Hq, 6), (2, 6), (2, 5), (2, 6)))
    return q, k, v, -g.exp(), torch.randn(2, 2, 6, 5, dtype=dtype)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, check_dtype=False)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [1, 9])
def test_values(T, v_first):
    q, k, v, g, state = inputs(T)
    o, final = oracle.chunk_gla(q, k, v, g, 0.3, state)
    passed, final = (state.mT.contiguous(), final.mT) if v_first else (state, final)
    close(fla.chunk_gla(q, k, v, g, 0.3, passed, True, v_first), (o, final))
    close(fla.fused_recurrent_gla(q, k, v, g, None, 0.3, passed, True, state_v_first=v_first), (o, final))
    if not v_first:
        close(fla.fused_chunk_gla(q, k, v, g, 0.3, passed, True), (o, final))
    without = oracle.chunk_gla(q, k, v, torch.zeros_like(g))[0]
    assert fla.fused_recurrent_gla(q, k, v)[1] is None
    torch.testing.assert_close(fla.fused_recurrent_gla(q, k, v)[0], without)
    torch.testing.assert_close(fla.chunk_gla(q, k, v, None)[0], without)


def test_a_token_without_gradients_is_a_step(monkeypatch):
    q, k, v, g, state = inputs(1)
    calls = []
    step = fla.ops._recurrent_gla_step
    monkeypatch.setattr(fla.ops, "_recurrent_gla_step", lambda *args, **kw: calls.append(1) or step(*args, **kw))
    fla.fused_recurrent_gla(q, k, v, g, initial_state=state)
    assert calls == [1]
    leaf = q.requires_grad_()
    o, _ = fla.fused_recurrent_gla(leaf, k, v, g, initial_state=state)
    o.sum().backward()
    assert calls == [1]
    with torch.no_grad():
        fla.fused_recurrent_gla(leaf, k, v, g)
    assert calls == [1, 1]


def test_packed_and_grouped():
    q, k, v, g, state = inputs(9, Hq=4)
    offsets = torch.tensor([0, 4, 9])
    packed = [x[:1] for x in (q, k, v, g)]
    expected = gla.chunk_gla(*packed, None, state, True, offsets)
    close(fla.chunk_gla(*packed, None, state, True, cu_seqlens=offsets, cu_seqlens_cpu=offsets), expected)
    close(fla.fused_recurrent_gla(*packed, initial_state=state, output_final_state=True, cu_seqlens=offsets), expected)


def test_its_backward_computes_states_again(monkeypatch):
    """So that a model takes no more memory than with flash-linear-attention's kernels, which keep no states either."""
    seen, original = [], fla.ops._chunk_gla
    monkeypatch.setattr(
        fla.ops, "_chunk_gla", lambda *args, **kw: seen.append(kw["recompute_states"]) or original(*args, **kw)
    )
    q, k, v, g, _ = inputs()
    fla.chunk_gla(q, k, v, g)
    fla.fused_recurrent_gla(q, k, v, g)
    fla.fused_chunk_gla(q, k, v, g)
    assert seen == [True] * 3


def test_the_longest_sequence_is_known_from_offsets_on_the_cpu(monkeypatch):
    seen = []
    original = fla.ops._chunk_gla
    monkeypatch.setattr(
        fla.ops, "_chunk_gla", lambda *args, **kw: seen.append(kw["max_seqlen"]) or original(*args, **kw)
    )
    q, k, v, g, _ = (x[:1] for x in inputs(9))
    offsets = torch.tensor([0, 2, 9])
    fla.chunk_gla(q, k, v, g, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    fla.chunk_gla(q, k, v, g, cu_seqlens=offsets)
    assert seen == [7, None]


def test_states_of_half_precision():
    q, k, v, g, state = inputs(9, dtype=torch.bfloat16)
    _, final = fla.chunk_gla(q, k, v, g, initial_state=state, output_final_state=True)
    assert final.dtype == torch.float32
    _, final = fla.fused_recurrent_gla(*(x[:, :1] for x in (q, k, v, g)), initial_state=state, output_final_state=True)
    assert final.dtype == torch.float32


def test_gradients():
    q, k, v, g, state = (x.requires_grad_() for x in inputs(9))
    o, final = fla.fused_recurrent_gla(q, k, v, g, None, None, state.mT, True, state_v_first=True)
    expected_o, expected = oracle.chunk_gla(q, k, v, g, None, state)
    leaves, dfinal = [q, k, v, g, state], torch.randn_like(expected)
    actual = torch.autograd.grad((o, final), leaves, (torch.ones_like(o), dfinal.mT))
    close(actual, torch.autograd.grad((expected_o, expected), leaves, (torch.ones_like(o), dfinal)))


def test_from_the_last_token_to_the_first():
    q, k, v, g, state = inputs(9)
    actual = fla.fused_recurrent_gla(q, k, v, g, None, 0.3, state, True, reverse=True)
    o, final = oracle.chunk_gla(*(x.flip(1) for x in (q, k, v, g)), 0.3, state)
    close(actual, (o.flip(1), final))


def test_what_is_deprecated_or_not_computed():
    q, k, v, g, state = inputs(9)
    options = {"output_final_state": True, "transpose_state_layout": True}
    with pytest.warns(DeprecationWarning, match="pass state_v_first"):
        _, final = fla.fused_recurrent_gla(q, k, v, g, initial_state=state.mT, **options)
    close([final], [oracle.chunk_gla(q, k, v, g, None, state)[1].mT])
    with pytest.raises(ValueError, match="both state_v_first and transpose_state_layout"):
        fla.fused_recurrent_gla(q, k, v, g, state_v_first=True, transpose_state_layout=True)
    with pytest.raises(NotImplementedError, match="gates of values"):
        fla.fused_recurrent_gla(q, k, v, g, v)
    with pytest.raises(TypeError, match="takes no argument 'gt'"):
        fla.fused_recurrent_gla(q, k, v, g, gt=1)
