"""Calls of prepared ops of our own backends, without gla_core's selection and its cache of plans."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gla_core.dispatch.backend import KnownDevice, OpCall, Prepared
from gla_core.ops import ABSTRACT_OPS, _results
from gla_core.ops.spec import picker

Prepare = Callable[[OpCall], Callable[..., Any]]
AMD_STEPPINGS = {(9, 4): 2, (9, 5): 0}
"""The last digit of the architectures gfx942 and gfx950, by their compute capabilities in PyTorch."""


def described(op: str, *arguments: Any) -> OpCall:
    """Returns the description of a call of an abstract op; it takes the first of the op's arguments, in order."""
    spec = ABSTRACT_OPS[op]
    return spec.describe(*spec.complete(arguments, {}))


def call_prepared(op: str, prepare: Prepare, *arguments: Any) -> Any:
    """Prepares a call of an abstract op, and returns what it computes, after the checks that every first call makes."""
    spec = ABSTRACT_OPS[op]
    complete = spec.complete(arguments, {})
    results = prepare(described(op, *arguments))(*complete[: len(spec.contract)])
    _results.check(op, results, spec.expected(*complete), complete)
    return results


def preparing(backend: str, op: str) -> Prepare:
    """Returns the function with which one of our own backends prepares an op, for arguments in the contract's order."""
    (plugin,) = importlib.import_module(f"gla_{backend}").gla_register_backends()
    prepared, names = plugin.ops[op], ABSTRACT_OPS[op].contract
    assert isinstance(prepared, Prepared)
    assert sorted(prepared.takes) == sorted(names)
    in_order = picker([names.index(name) for name in prepared.takes])

    def prepare(call: OpCall) -> Callable[..., Any]:
        run = prepared.prepare(call)
        return lambda *args: run(*in_order(args))

    return prepare


class Absent:
    """Takes the place of Triton's driver: a device for which kernels are only compiled."""

    def __init__(self, device: KnownDevice) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = device.compute_capability
        if device.vendor == "AMD":
            self.target = GPUTarget("hip", f"gfx{major}{minor}{AMD_STEPPINGS[major, minor]}", 64)
        else:
            self.target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 1000 + abs(hash(self.target)) % 10**6  # Triton's caches are per device number

    def get_current_stream(self, _device: int) -> int:
        return 0


def launches_on(
    device: KnownDevice,
    backend: str,
    precision: str,
    op: str,
    *arguments: Any,
    monkeypatch: pytest.MonkeyPatch,
    batch_invariant: int | None = None,
) -> list[Any]:
    """Returns the launches that preparing a call compiles for a device that need not be here.

    Args:
        precision: the float32 matmul precision of the call.
        batch_invariant: as in `OpCall`.
    """
    from triton.runtime.driver import driver

    from gla_triton_runtime import prepared

    made: list[Any] = []
    monkeypatch.setattr(driver, "_active", Absent(device))
    monkeypatch.setattr(prepared, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(prepared, "compile_launches", made.extend)
    call = dataclasses.replace(
        described(op, *arguments),
        device=torch.device("cuda", 0),
        assumed=device,
        float32_matmul_precision=precision,
        batch_invariant=batch_invariant,
    )
    preparing(backend, op)(call)
    return made
