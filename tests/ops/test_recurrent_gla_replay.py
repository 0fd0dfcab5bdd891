"""recurrent_gla_replay: any call, and servers. tests/ops/test_serving.py has what it shares with other ops."""

import itertools
import random

import torch
from hypothesis import given, settings

import gla_core as gla
from gla_core.conformance.tolerances import relative_error
from gla_core.workloads.inputs import gla_inputs
from tests.ops.serving import REPLAY, check, ints
from tests.replay_calls import replay_calls


@settings(max_examples=30)
@given(replay_calls(dtype=torch.float64))
def test_any_call(x):
    check(REPLAY, x, 1e-12)


# ---- servers


class Request:
    """A request of a server: the state after its accepted tokens, which steps compute one by one."""

    def __init__(self, slot):
        self.slot, self.start, self.accepted, self.is_new = slot, 0, 0, True
        self.state = torch.zeros(1, 2, 4, 3, dtype=torch.float64)


def served(requests, x, pool, rings):
    """Returns o of a call with packed tokens x, one sequence for each request."""
    numbers = (ints(*(getattr(each, name) for each in requests)) for name in ("slot", "start", "accepted"))
    old = torch.tensor([not each.is_new for each in requests])
    o = gla.recurrent_gla_replay(x.q, x.k, x.v, x.g, pool, *rings, *numbers, cu_seqlens=x.cu_seqlens, has_state=old)
    for each in requests:
        each.start, each.is_new = (each.start + each.accepted) % rings[0].shape[1], False
    return o


def steps_of(request, x, a, b):
    """Returns o of the tokens a to b, and the states before, between and after them, by steps one by one."""
    outs, states = [], [request.state]
    for t in range(a, b):
        o, state = gla.recurrent_gla_step(*(y[:, t] for y in (x.q, x.k, x.v, x.g)), states[-1])
        outs.append(o)
        states.append(state)
    return outs, states


def test_a_server_equals_steps_over_the_accepted_tokens():
    """Requests come and go in dirty slots, with drafts of any length; at the end the pool holds their states."""
    numbers = random.Random(0)
    pool = torch.randn(5, 2, 4, 3, dtype=torch.float64)
    rings = [torch.full((5, 7, 2, width), torch.nan, dtype=torch.float64) for width in (4, 3, 4)]
    free, requests = list(range(5)), []
    for seed in range(25):
        while requests and (len(requests) > 3 or numbers.random() < 0.2):
            free.append(requests.pop(numbers.randrange(len(requests))).slot)
        requests.append(Request(free.pop(numbers.randrange(len(free)))))
        lengths = tuple(numbers.randint(0, 3) for _ in requests)
        x = gla_inputs(lengths=lengths, H=2, K=4, V=3, dtype=torch.float64, seed=seed)
        o = served(requests, x, pool, rings)
        for each, (a, b) in zip(requests, itertools.pairwise(x.cu_seqlens.tolist()), strict=True):
            assert relative_error(pool[each.slot], each.state[0]) <= 1e-12
            outs, states = steps_of(each, x, a, b)
            assert all(relative_error(o[:, a + i], y) <= 1e-12 for i, y in enumerate(outs))
            each.accepted = numbers.randint(0, b - a)
            each.state = states[each.accepted]
    served(requests, gla_inputs(lengths=(0,) * len(requests), H=2, K=4, V=3, dtype=torch.float64), pool, rings)
    assert all(relative_error(pool[each.slot], each.state[0]) <= 1e-12 for each in requests)


def test_it_gives_the_outputs_of_recurrent_gla_steps():
    """Both ways of verifying drafts, after a prompt: the same accepted tokens give the same outputs and states."""
    x = gla_inputs(B=2, T=9, H=2, K=4, V=3, dtype=torch.float64)
    pool, slots = torch.zeros(2, 2, 4, 3, dtype=torch.float64), ints(0, 1)
    rings = [torch.zeros(2, 6, 2, width, dtype=torch.float64) for width in (4, 3, 4)]
    many, places = torch.zeros(6, 2, 4, 3, dtype=torch.float64), torch.arange(6).reshape(2, 3)
    start, accepted = ints(0, 0), ints(0, 0)
    for i, next_accepted in enumerate((ints(3, 1), ints(2, 3), ints(1, 1))):
        tokens = [y[:, 3 * i : 3 * i + 3] for y in (x.q, x.k, x.v, x.g)]
        o = gla.recurrent_gla_replay(*tokens, pool, *rings, slots, start, accepted)
        assert relative_error(o, gla.recurrent_gla_steps(*tokens, many, places, num_accepted=accepted)) <= 1e-12
        start, accepted = (start + accepted) % 6, next_accepted
    none = [y[:, :0] for y in (x.q, x.k, x.v, x.g)]
    assert gla.recurrent_gla_replay(*none, pool, *rings, slots, start, accepted).shape == (2, 0, 2, 3)
    assert relative_error(pool, many[[0, 3]]) <= 1e-12  # one token of the last call was accepted
