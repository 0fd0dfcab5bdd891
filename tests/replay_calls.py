"""Random calls of recurrent_gla_replay."""

from hypothesis import strategies as st

from gla_core.dispatch.backend import GATES
from gla_core.workloads.inputs import replay_inputs
from gla_core.workloads.named import Workload


def replay_arguments(sizes, **changes):
    """Returns the arguments of a call with the sizes of a workload."""
    return replay_inputs(Workload("", "recurrent_gla_replay", frozenset(), sizes), **changes)


@st.composite
def replay_calls(draw, **changes):
    """Draws arguments: slots are distinct, with pads; sequences are new at random, and tokens accepted at random."""
    lengths = draw(st.none() | st.lists(st.integers(0, 4), max_size=4))
    N, T = (draw(st.integers(1, 4)), draw(st.integers(0, 4))) if lengths is None else (len(lengths), 0)

    def numbers(least, most):
        return tuple(draw(st.lists(st.integers(least, most), min_size=N, max_size=N)))

    sizes = {"H": draw(st.integers(1, 2)), "K": draw(st.integers(1, 9)), "V": draw(st.integers(1, 9))}
    sizes |= draw(st.sampled_from([{}, {"G": 2}, {"R": 3}]))
    sizes |= {"L": draw(st.integers(max(2, 2 * T), 9)), "pool": 6, "page": draw(st.integers(0, 3))}
    sizes |= {"slots": tuple(draw(st.permutations(range(-1, 8)))[:N]), "pad_slot": draw(st.sampled_from([-1, 0]))}
    sizes |= {"ring_start": numbers(-3, 20), "num_accepted": numbers(-1, 6)}
    sizes |= {"has_state": tuple(map(bool, numbers(0, 1)))} if N and draw(st.booleans()) else {}
    sizes |= {"B": N, "T": T} if lengths is None else {"lengths": tuple(lengths), "padding": draw(st.integers(0, 3))}
    sizes["gates"], sizes["gate_form"] = draw(st.sampled_from([("none", "key"), *(("-inf", form) for form in GATES)]))
    return replay_arguments(sizes, **changes)
