"""Backends that are registered at run time, and plans, which change with the set of backends."""

import pytest
import torch

import gla_core as gla
from gla_core.dispatch.backend import Backend, Capabilities

SOFTMAX_AND_GRADIENT = ("online_softmax", "online_softmax_bwd")
"""The ops of a backend with a softmax alone; PyTorch computes its gradient."""


def softmax(x, dim):
    return torch.softmax(x, dim)


def test_register_and_unregister(own_backends, x, info):
    handle = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    assert info("mine") == gla.BackendInfo("mine", "1.0", SOFTMAX_AND_GRADIENT, Capabilities(), "register()")
    torch.testing.assert_close(gla.online_softmax(x, backend="mine"), torch.softmax(x, -1))
    handle.unregister()
    assert info("mine") is None
    with pytest.raises(gla.UnknownBackendError) as error:
        gla.online_softmax(x, backend="mine")
    assert f"unknown backend 'mine' (installed: {', '.join(own_backends)})" in str(error.value)


def test_unregistering_twice_does_nothing(own_backends):
    handle = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    handle.unregister()
    handle.unregister()
    assert [b.name for b in gla.backends()] == own_backends


def test_a_handle_takes_back_only_its_own_registration(info):
    first = gla.register(Backend("mine", "1.0", {"online_softmax": softmax}))
    first.unregister()
    with gla.register(Backend("mine", "2.0", {"online_softmax": softmax})):
        first.unregister()
        assert info("mine").version == "2.0"


def test_a_used_handle_does_not_take_back_a_later_registration_of_the_same_backend(info):
    backend = Backend("mine", "1.0", {"online_softmax": softmax})
    first = gla.register(backend)
    first.unregister()
    with gla.register(backend):
        first.unregister()
        assert info("mine") is not None


def test_the_handle_is_a_context_manager_that_gives_the_backend(info):
    backend = Backend("mine", "1.0", {"online_softmax": softmax})
    with gla.register(backend) as registered:
        assert registered is backend
        assert info("mine") is not None
    assert info("mine") is None
    with pytest.raises(KeyError), gla.register(backend):
        raise KeyError
    assert info("mine") is None


def test_registrations_stay_over_reload_environment(spy, x):
    mine = spy("mine")
    gla.reload_environment()
    gla.online_softmax(x, backend="mine")
    assert mine.calls == ["online_softmax"]


def test_what_backends_returns_is_a_copy(info):
    gla.backends().clear()
    assert info("reference") is not None


# plans: a call's backend is chosen once per signature, and again when the set of backends changes


def test_a_plan_is_dropped_when_a_better_backend_is_registered(spy, x):
    first = spy("first", cost=lambda call: 2.0)
    gla.online_softmax(x)
    second = spy("second", cost=lambda call: 1.0)
    gla.online_softmax(x)
    second.handle.unregister()
    gla.online_softmax(x)
    assert (len(first.calls), len(second.calls)) == (2, 1)


def test_a_plan_is_dropped_when_its_backend_is_unregistered(spy, x):
    gone = spy("gone")
    gla.online_softmax(x, backend="gone")
    gone.handle.unregister()
    with pytest.raises(gla.UnknownBackendError):
        gla.online_softmax(x, backend="gone")
    again = spy("gone")
    gla.online_softmax(x, backend="gone")
    assert (len(gone.calls), len(again.calls)) == (1, 1)


def test_a_plan_made_while_the_backends_change_is_not_kept(spy, x):
    def supports(call):
        gone.handle.unregister()  # another thread might do this after the choice and before it is stored

    gone = spy("gone", supports=supports, cost=lambda call: 1.0)
    gla.online_softmax(x)
    calls = len(gone.calls)
    gla.online_softmax(x)
    assert len(gone.calls) == calls
