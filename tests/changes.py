"""Ways in which people change one module of a model, and what has to hold after each of them.

`check` takes a model, changes one of its modules, and compares runs that may go past a module's `__call__` (an
evaluation, a prompt and steps) with one that may not (a forward with gradients). A change that steers scales what the
module computes, so that a call which is left out shows in the results as well as in the number of calls.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization


class Runs(NamedTuple):
    """The runs of a model that are compared.

    Attributes:
        whole: computes the results of a whole sequence.
        stepped: computes the same by a prompt and steps, without gradients.
        forwards: the number of forwards in `stepped`.
        loss: computes a loss in training.
        generated: for language models, computes some tokens, with a cache or without; the number of forwards is that of
            the tokens.
    """

    whole: Callable[[nn.Module], Tensor]
    stepped: Callable[[nn.Module], Tensor]
    forwards: int
    loss: Callable[[nn.Module], Tensor]
    generated: Callable[[nn.Module, bool], Tensor] | None = None


class Change(NamedTuple):
    """A change of the child `name` of a module `owner`.

    Attributes:
        make: a context manager (owner, name, calls, factor) that makes the change. Each call of the child adds to
            calls, and its result (or a weight) is multiplied by the factor, or its input shifted.
        steers: whether the factor may differ from 1.
        trains: whether the model can be trained with it.
        weights: whether it needs weights of the child itself.
    """

    make: Callable
    steers: bool = True
    trains: bool = True
    weights: bool = False


def scaled(y: Any, factor: float) -> Any:
    """Returns y, or a tuple with its first part, multiplied by the factor; y itself, which keeps its node, for 1."""
    if factor == 1:
        return y
    if isinstance(y, Tensor):
        return y * factor
    rest = y[1:] if type(y) is tuple else None
    if rest is None:
        raise TypeError(f"a module returned {type(y).__name__}; expected a tensor or a tuple")
    return scaled(y[0], factor), *rest


@contextlib.contextmanager
def hook(owner, name, calls, factor):
    def after(module, args, y):
        calls.append(name)
        return scaled(y, factor)

    getattr(owner, name).register_forward_hook(after)
    yield


@contextlib.contextmanager
def hook_before(owner, name, calls, factor):
    def before(module, args, kwargs):
        calls.append(name)
        if args:
            return (shifted(args[0]), *args[1:]), kwargs
        first = next(key for key, x in kwargs.items() if isinstance(x, Tensor))
        return args, kwargs | {first: shifted(kwargs[first])}

    def shifted(x):  # a norm would undo a factor
        return x if factor == 1 else x + (factor - 1) if x.is_floating_point() else x - 1

    getattr(owner, name).register_forward_pre_hook(before, with_kwargs=True)
    yield


@contextlib.contextmanager
def backward_hook(owner, name, calls, factor):
    getattr(owner, name).register_full_backward_hook(lambda *_: calls.append(name))
    yield


@contextlib.contextmanager
def global_hook(owner, name, calls, factor):
    wanted = getattr(owner, name)

    def after(module, args, y):
        if module is not wanted:
            return None
        calls.append(name)
        return scaled(y, factor)

    handle = register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def patched(owner, name, calls, factor):
    module = getattr(owner, name)
    forward = module.forward

    def instead(*args, **kwargs):
        calls.append(name)
        return scaled(forward(*args, **kwargs), factor)

    module.forward = instead
    yield


@contextlib.contextmanager
def subclass(owner, name, calls, factor):
    module = getattr(owner, name)

    class Mine(type(module)):
        def forward(self, *args, **kwargs):
            calls.append(name)
            return scaled(super().forward(*args, **kwargs), factor)

    module.__class__ = Mine
    yield


@contextlib.contextmanager
def adapter(owner, name, calls, factor):
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            calls.append(name)
            return scaled(self.inner(*args, **kwargs), factor)

    setattr(owner, name, Adapter(getattr(owner, name)))
    yield


@contextlib.contextmanager
def checkpointed(owner, name, calls, factor):
    module = getattr(owner, name)
    setattr(owner, name, checkpoint_wrapper(module))
    getattr(owner, name).register_forward_hook(lambda *_: calls.append(name))
    yield


@contextlib.contextmanager
def compiled(owner, name, calls, factor):
    torch._dynamo.reset()
    setattr(owner, name, torch.compile(getattr(owner, name), backend="eager"))
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def parametrized(owner, name, calls, factor):
    class Scale(nn.Module):
        def forward(self, weight):  # whenever the weight is read; this is no call
            return weight * factor

    module = getattr(owner, name)
    register_parametrization(module, next(key for key, x in module._parameters.items() if x is not None), Scale())
    yield


@contextlib.contextmanager
def normed_weight(owner, name, calls, factor):
    module = getattr(owner, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        key = next(key for key, x in module._parameters.items() if x is not None)
        nn.utils.weight_norm(module, key, None)
    module.register_forward_pre_hook(lambda *_: calls.append(name))
    yield


@contextlib.contextmanager
def offloaded(owner, name, calls, factor):
    """Keeps the module's weights on the device "meta" outside of its forward, as accelerate does."""
    module = getattr(owner, name)
    forward, weights = module.forward, {key: x for key, x in module._parameters.items() if x is not None}
    away = {key: nn.Parameter(x.to("meta"), x.requires_grad) for key, x in weights.items()}

    def instead(*args, **kwargs):
        calls.append(name)
        module._parameters.update(weights)
        try:
            return scaled(forward(*args, **kwargs), factor)
        finally:
            module._parameters.update(away)

    module._parameters.update(away)
    module.forward = instead
    yield


@contextlib.contextmanager
def freed(owner, name, calls, factor):
    """Frees the memory of the module's weights outside of its forward and backward, as FSDP2 does.

    The backward is seen by hooks of tensors; hooks of the module would add a node behind its result.
    """
    module = getattr(owner, name)
    weights = [x for x in module._parameters.values() if x is not None]
    kept = [x.detach().clone() for x in weights]
    for x in weights:
        x.data = x.detach().clone()  # of a memory that belongs to it alone

    def free(*_):
        for x in weights:
            x.untyped_storage().resize_(0)

    def gather(*_):
        for x, values in zip(weights, kept, strict=True):
            x.untyped_storage().resize_(values.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
                x.copy_(values)

    def after(module, args, y):
        calls.append(name)
        free()
        for x, then in (args[0], free), (y if isinstance(y, Tensor) else y[0], gather):
            if x.requires_grad:
                x.register_hook(lambda gradient, then=then: then())
        return scaled(y, factor)

    free()
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(after)
    yield
    gather()


CHANGES = {
    "hook": Change(hook),
    "hook_before": Change(hook_before),
    "backward_hook": Change(backward_hook, steers=False),
    "global_hook": Change(global_hook),
    "patched": Change(patched),
    "subclass": Change(subclass),
    "adapter": Change(adapter),
    "checkpointed": Change(checkpointed, steers=False),
    "compiled": Change(compiled, steers=False),
    "parametrized": Change(parametrized, weights=True),
    "normed_weight": Change(normed_weight, steers=False, weights=True),
    "offloaded": Change(offloaded, trains=False, weights=True),
    "freed": Change(freed, weights=True),
}
QUICK = [name for name in CHANGES if name != "compiled"]


def places(model: nn.Module) -> Iterator[str]:
    """Yields the paths of all modules in a model that are called; lists of modules are not."""
    for path, module in model.named_modules():
        if path and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield path


def parts_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Returns the module that has a module as its child, and the name of the child."""
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name


def applies(model: nn.Module, path: str, name: str) -> bool:
    """Returns whether a change can be made at a path."""
    module = model.get_submodule(path)
    return not CHANGES[name].weights or any(x is not None for x in module._parameters.values())


def check(model: nn.Module, path: str, name: str, runs: Runs, close: dict[str, float]) -> None:
    """Checks that a model computes what its changed module says, in every run, and calls the module in each forward."""
    change = CHANGES[name]
    if change.steers or not change.trains:
        _check_calls(copy.deepcopy(model), path, change, 1.5 if change.steers else 1.0, runs, close)
    if change.trains:
        _check_training(model, copy.deepcopy(model), path, change, runs, close)


def _check_calls(model, path, change, factor, runs, close):
    calls: list[str] = []
    before = runs.whole(model).detach()
    with change.make(*parts_of(model, path), calls, factor):
        expected = runs.whole(model).detach()
        each = len(calls)
        calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(runs.whole(model), expected, **close)
            torch.testing.assert_close(runs.whole(model), expected, **close)  # nothing has been overwritten
            assert len(calls) == 2 * each
            calls.clear()
            torch.testing.assert_close(runs.stepped(model), expected, **close)
        assert len(calls) == runs.forwards * each
        if runs.generated is not None:
            calls.clear()
            tokens = runs.generated(model, True)
            assert len(calls) == tokens.shape[1] * each
            assert torch.equal(tokens, runs.generated(model, False))
    if factor != 1 and each:
        assert not torch.allclose(before, expected, **close)


def _check_training(model, other, path, change, runs, close):
    names, calls = [name for name, _ in model.named_parameters()], []
    expected = gradients(model, [model.get_parameter(name) for name in names], runs)
    parameters = [other.get_parameter(name) for name in names]
    with change.make(*parts_of(other, path), calls, 1.0):
        actual = gradients(other, _now(other, parameters), runs)
        with torch.no_grad():
            torch.testing.assert_close(runs.stepped(other), runs.whole(model).detach(), **close)
    for a, b in zip(actual, expected, strict=True):
        if a is not None:  # None is of a weight that the change has split in two
            torch.testing.assert_close(a, b, **close)


def _now(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter | None]:
    """Returns the parameters, and None for those that a model does not have any more."""
    kept = {id(x) for x in model.parameters()}
    return [x if id(x) in kept else None for x in parameters]


def gradients(model: nn.Module, parameters: list[nn.Parameter | None], runs: Runs) -> list[Tensor | None]:
    """Returns the loss, and its gradient for each parameter; None for None."""
    loss = runs.loss(model)
    wanted = [x for x in parameters if x is not None]
    actual = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [loss, *(None if x is None else next(actual) for x in parameters)]
