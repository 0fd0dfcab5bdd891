"""Selection: the ranking of `auto`, and the needs of a call."""

import contextlib

import pytest
import torch

import gla_core as gla

pytestmark = pytest.mark.usefixtures("only_reference")


# auto: the ranking


def test_auto_takes_the_least_predicted_time(spy, x):
    slow, fast, middle = (spy(name, cost=lambda call, s=s: s) for name, s in (("a", 3e-3), ("b", 1e-3), ("c", 2e-3)))
    gla.online_softmax(x)
    assert (slow.calls, fast.calls, middle.calls) == ([], ["online_softmax"], [])


def test_auto_ranks_anew_for_every_shape(spy):
    spy("short", cost=lambda call: call.dims["columns"] * 1.0)
    spy("long", cost=lambda call: 100.0)
    winners = [gla.explain("online_softmax", torch.zeros(2, columns)).winner for columns in (1, 99, 100, 101, 1000)]
    assert winners == ["short", "short", "long", "long", "long"]  # a tie goes by name


def test_a_cheaper_backend_that_cannot_run_is_passed_over(spy, x):
    spy("half", cost=lambda call: 1e-9, dtypes=frozenset({torch.float16}))
    spy("picky", cost=lambda call: 1e-8, supports=lambda call: "only on Sundays")
    able = spy("able", cost=lambda call: 1.0)
    gla.online_softmax(x)
    assert able.calls == ["online_softmax"]


def test_those_that_predict_come_before_those_that_do_not(spy, x):
    named = frozenset({"cpu"})
    spy("a", devices=named)
    spy("b", cost=lambda call: None, devices=named)
    spy("c", cost=lambda call: float("nan"), devices=named)
    spy("d", cost=lambda call: 1 / 0, devices=named)
    spy("z", cost=lambda call: 1e9)
    assert [c.name for c in gla.explain("online_softmax", x).candidates] == ["z", "a", "b", "c", "d", "reference"]


def test_without_predictions_those_for_the_fewest_devices_come_first_then_by_name(spy, x):
    spy("z_named", devices=frozenset({"cpu"}))
    spy("a_named", devices=frozenset({"cpu", "cuda"}))
    spy("y_named", devices=frozenset({"cpu"}))
    spy("z_any")
    spy("a_any")
    assert [c.name for c in gla.explain("online_softmax", x).candidates] == [
        "y_named",
        "z_named",
        "a_named",
        "a_any",
        "reference",
        "z_any",
    ]


def test_equal_predictions_go_by_devices_then_name(spy, x):
    for name, devices in (("a", None), ("c", frozenset({"cpu"})), ("b", frozenset({"cpu"}))):
        spy(name, cost=lambda call: 1.0, devices=devices)
    explanation = gla.explain("online_softmax", x)
    assert [c.name for c in explanation.candidates][:3] == ["b", "c", "a"]
    why = "b: c and a predict the same time; the one written for the fewest types of device is"
    assert explanation.why.startswith(why)


def test_the_order_of_registration_does_not_matter(spy, x):
    for names in ("abc", "cba"):
        made = [spy(name) for name in names]
        assert gla.explain("online_softmax", x).winner == "a"
        for each in made:
            each.handle.unregister()


# auto: packed sequences, whose lengths are not known


def packed(T=1000, N=10, **options):
    q = torch.zeros(1, T, 1, 4)
    return gla.explain("chunk_gla_fwd", q, q, q, cu_seqlens=torch.arange(N + 1) * (T // N), **options)


def seconds_of(uneven, even):
    """Returns a cost: `uneven` s if one sequence has all 1000 tokens, `even` s if none of ten has more than 150."""
    return lambda call: even + (uneven - even) * max(0, (call.longest or 150) - 150) / 850


def test_of_packed_sequences_the_least_regret_decides(spy):
    spy("serial", cost=seconds_of(uneven=9.0, even=1.0))
    spy("cut", cost=seconds_of(uneven=3.0, even=1.2))
    explanation = packed()
    assert explanation.winner == "cut"
    assert [(c.seconds, c.worst) for c in explanation.candidates[:2]] == [(1.2, 3.0), (1.0, 9.0)]
    assert "cut: the least regret" in str(explanation)
    assert "predicts 1.00 s, 9.00 s at worst" in str(explanation)


@pytest.mark.parametrize(
    ("serial", "cut"),
    [
        ((3.3, 1.0), (3.0, 1.2)),  # a small risk is taken
        ((2.3, 1.0), (1.0, 1.6)),  # the expected lengths count twice: 1.6 ** 2 is more than 2.3
    ],
)
def test_what_regret_is_least(spy, serial, cut):
    spy("serial", cost=seconds_of(*serial))
    spy("cut", cost=seconds_of(*cut))
    assert packed().winner == "serial"


def test_a_bound_of_the_lengths_ends_the_doubt(spy):
    spy("serial", cost=seconds_of(uneven=9.0, even=1.0))
    spy("cut", cost=seconds_of(uneven=3.0, even=1.2))
    assert packed(max_seqlen=150).winner == "serial"
    assert packed(max_seqlen=1000).winner == "cut"
    explanation = packed(max_seqlen=150).candidates[0]
    assert (explanation.seconds, explanation.worst) == (1.0, None)
    assert packed(N=1).winner == "cut"  # for one sequence, the expected length is the real one
    q = torch.zeros(1, 1000, 1, 4)
    assert gla.explain("chunk_gla_fwd", q, q, q, max_seqlen=3).call.longest is None  # useless for equal lengths


def test_forward_and_backward_are_given_the_bound(spy):
    bounds = []

    def cost(call):
        bounds.append((call.op, call.longest))
        return 1.0

    spy("mine", cost=cost)
    q, k, v = (torch.zeros(1, 30, 1, 4, requires_grad=True) for _ in range(3))
    gla.chunk_gla(q, k, v, cu_seqlens=torch.tensor([0, 20, 30]), max_seqlen=20)[0].sum().backward()
    assert set(bounds) == {("chunk_gla_fwd", 20), ("chunk_gla_bwd", 20)}


# auto: no backend can run the call


def test_auto_that_none_can_serve_is_an_error_with_every_refusal(spy, x, set_environment, own_backends):
    spy("gpu", devices=frozenset({"cuda"}))
    spy("half", dtypes=frozenset({torch.float16}))
    spy("other", ops=["chunk_gla_fwd"])
    set_environment(GLA_BLOCK_PLUGINS=",".join(own_backends))
    with pytest.raises(gla.NoBackendError) as error:
        gla.online_softmax(x)
    assert str(error.value) == (
        "no backend can run online_softmax (request: auto, from default):\n"
        "  gpu: needs a cuda device; x is on cpu\n"
        "  half: computes float16; x is float32\n"
        "  other: does not implement online_softmax; it implements chunk_gla_fwd, chunk_gla_pool, chunk_ssd_fwd"
    )


def test_one_faulty_backend_does_not_take_the_others_down(spy, x):
    def fault(call):
        raise RuntimeError("a bug")

    spy("a", supports=fault, devices=frozenset({"cpu"}))
    b = spy("b", cost=fault)
    gla.online_softmax(x)
    assert b.calls == ["online_softmax"]
    refusals = {c.name: c.refusal for c in gla.explain("online_softmax", x).candidates}
    assert refusals["a"] == "its supports() raised RuntimeError: a bug"


def test_a_backend_with_unreadable_widths_does_not_take_the_others_down(spy, qkvg):
    with contextlib.suppress(gla.BackendError):  # registration may refuse it, too
        spy("odd", key_widths=frozenset({64, 128}))
    assert gla.chunk_gla(*qkvg())[0].shape == (1, 5, 2, 3)


# the needs of a call restrict the backends that may run it


def test_a_call_that_needs_a_gradient_passes_over_a_backend_without(spy, x):
    no_gradient = spy("no_gradient", cost=lambda call: 1.0, gradients=False)
    gla.online_softmax(x)
    gla.online_softmax(x.clone().requires_grad_())
    with torch.no_grad():
        gla.online_softmax(x.clone().requires_grad_())
    assert len(no_gradient.calls) == 2


def test_deterministic_algorithms_pass_over_a_backend_that_is_not(spy, x):
    atomics = spy("atomics", cost=lambda call: 1.0, deterministic=False)
    gla.online_softmax(x)
    torch.use_deterministic_algorithms(True)
    try:
        gla.online_softmax(x)
        with pytest.raises(gla.NoBackendError, match="is not deterministic"):
            gla.online_softmax(x, backend="atomics")
    finally:
        torch.use_deterministic_algorithms(False)
    gla.online_softmax(x)
    assert len(atomics.calls) == 2


def test_packed_sequences_and_grouped_queries_pass_over_a_backend_without(spy, qkvg):
    dense = spy("dense", cost=lambda call: 1.0, variable_length=False)
    plain = spy("plain", cost=lambda call: 2.0, grouped_queries=False)
    q, k, v, g = qkvg(T=6)
    gla.chunk_gla(q, k, v, g)
    gla.chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 2, 6]))
    gla.chunk_gla(*qkvg(H=2, Hq=4), cu_seqlens=torch.tensor([0, 5]))
    assert (len(dense.calls), len(plain.calls)) == (1, 1)


def test_what_the_backend_is_asked_describes_the_call(spy, qkvg):
    asked = []
    spy("curious", cost=lambda call: 1.0, supports=lambda call: asked.append(call))
    q, k, v, g = qkvg(B=2, T=7, H=2, Hq=4, K=4, V=3)
    gla.chunk_gla(q.half(), k.half(), v.half(), g, initial_state=torch.zeros(2, 2, 4, 3), backend="curious")
    (call,) = asked
    assert call.op == "chunk_gla_fwd"
    assert (call.device, call.dtype) == (torch.device("cpu"), torch.float16)
    assert dict(call.dims) == {"B": 2, "T": 7, "H": 2, "Hq": 4, "Hv": 2, "K": 4, "V": 3, "N": 2}
    assert (call.gate_dtype, call.gate_form, call.state_dtype) == (torch.float32, "key", torch.float32)
    assert (call.variable_length, call.needs_grad, call.deterministic, call.capturing) == (False,) * 4


def test_a_choice_is_made_once_per_signature(spy, x):
    asked = []
    spy("curious", cost=lambda call: asked.append(call) or 1.0)
    for _ in range(3):
        gla.online_softmax(x)
    once = len(asked)
    assert once >= 1
    gla.online_softmax(torch.zeros(9, 9))
    assert len(asked) == 2 * once


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"g": None}, {"g": 0.5}),
        ({"initial_state": None}, {"initial_state": 1.0}),
        ({"cu_seqlens": None}, {"cu_seqlens": 2.0}),
        ({"output_final_state": True}, {"output_final_state": 1}),
        ({"scale": 1}, {"scale": True}),
    ],
)
def test_a_bad_argument_is_refused_though_a_good_call_like_it_was_made_before(spy, qkvg, good, bad):
    q, k, v, _ = qkvg()
    (name,) = bad
    mine = spy("mine")
    gla.chunk_gla(q, k, v, **good, backend="mine")
    with pytest.raises(TypeError, match=name):
        gla.chunk_gla(q, k, v, **bad, backend="mine")
    assert len(mine.calls) == 1
