"""Tensor parallelism over the heads of a layer: each rank computes some heads, with one all-reduce in each direction.

    x, whole on every rank -> this rank's heads: projections, convolutions, gates, op and norm -> its summand of y

The forward sums the outputs of all ranks, and the backward sums their gradients of x. The norm of HGRN2 covers all
heads, so it also sums the squares over the ranks, one number per token. Parameters are DTensors, as optimizers and
checkpoints need. A module computes with its rank's shards of them as plain tensors, so layers need no code for tensor
parallelism, with two exceptions. `Retention` has to know its `first_head`, because its constant gates depend on the
index of a head. Layers that have parameters beside their modules take this rank's part of them by a function, `local`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
Placements = Mapping[str, Placement]
"""Placements of the parameters of a layer's modules; dimension 0 of a linear layer's weight is its outputs."""
GLA_PLACEMENTS: Placements = {  # also of SimpleGatedLinearAttention and Retention
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), COLUMNS),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), COLUMNS),  # each channel by itself
    "gk_proj.0": WHOLE,  # its output is small and shared by all heads
    "gk_proj.1": COLUMNS,
    "gk_proj": COLUMNS,  # of SimpleGatedLinearAttention, one output for each head
    **dict.fromkeys(("g_norm", "g_norm_swish_gate"), WHOLE),  # each head by itself, with one weight for all heads
    "o_proj": ROWS,
}
HGRN2_PLACEMENTS: Placements = {
    **dict.fromkeys(("q_proj", "f_proj", "i_proj", "q_conv1d", "f_conv1d", "i_conv1d"), COLUMNS),
    "g_norm": COLUMNS,  # over all heads together
    "o_proj": ROWS,
}
DELTA_RULE_PLACEMENTS: Placements = {  # of KimiDeltaAttention, GatedDeltaNet and DeltaNet
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), COLUMNS),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), COLUMNS),
    **dict.fromkeys(("f_proj.0", "g_proj.0"), WHOLE),
    **dict.fromkeys(("f_proj.1", "g_proj.1"), COLUMNS),
    "o_norm": WHOLE,
    "o_proj": ROWS,
}


def tensor_parallel_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Returns a plan for `parallelize_module` that spreads the heads of a layer of `gla_core.nn` over ranks.

    Every rank then calls the layer with the same whole x and gets the whole y. The layer's `num_heads`, `num_kv_heads`
    and `num_v_heads`, its states, and the `lower_bound` of `HGRN2` cover the rank's heads only. Everything else works
    as before, including `context_parallel` over other ranks.

    `Mamba2` has no plan, because one projection and one convolution compute all its heads together. Keep it whole on
    every rank, or spread its tokens with `context_parallel`.

    Raises:
        TypeError: `layer` is `Mamba2`, or no layer of `gla_core.nn`.
        ValueError: raised by `parallelize_module` if num_heads, num_kv_heads or num_v_heads is not a multiple of the
            number of ranks.

    Example:
        >>> mesh = init_device_mesh("cuda", (2,))
        >>> parallelize_module(layer, mesh, tensor_parallel_plan(layer))
    """
    modules = [name for name, module in layer.named_modules() if name and module._parameters]
    for placements in (GLA_PLACEMENTS, HGRN2_PLACEMENTS, DELTA_RULE_PLACEMENTS):
        if modules and placements.keys() >= set(modules):
            return {"": _LocalHeads(), **{name: _Spread(placements[name]) for name in modules}}
    raise TypeError(
        f"layer is {type(layer).__name__}; expected GatedLinearAttention, SimpleGatedLinearAttention, Retention, "
        "HGRN2, KimiDeltaAttention, GatedDeltaNet or DeltaNet of gla_core.nn: make a plan for each of these layers, "
        "and keep other layers whole on every rank; the tokens of Mamba2 can be spread over ranks instead, with "
        "context_parallel"
    )


class _LocalHeads(ParallelStyle):
    """Sets a layer's sizes to this rank's number of heads, and sums the ranks' gradients of the layer's input.

    It also spreads the parameters of the layer itself, each of which has a part for every head.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        ranks = device_mesh.size()
        for name in ("num_kv_heads", "num_v_heads", "num_heads"):
            if not hasattr(layer, name):
                continue
            number = getattr(layer, name)
            if number % ranks:
                raise ValueError(f"{name} is {number}; expected a multiple of the mesh's {ranks} ranks")
            setattr(layer, name, number // ranks)
        if hasattr(layer, "first_head"):
            layer.first_head = device_mesh.get_local_rank() * layer.num_heads
        if hasattr(layer, "local"):
            _spread(layer, device_mesh, COLUMNS, self.src_data_rank)
            layer.local = _local
        for convolution in layer.convolutions:
            convolution.width //= ranks

        def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (_read_by_all(args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"x": _read_by_all(kwargs["x"], device_mesh)}

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class _Spread(ParallelStyle):
    """Spreads the parameters of a module without children over ranks; the module computes with this rank's shards."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _spread(module, device_mesh, self.placement, self.src_data_rank)
        if self.placement == COLUMNS and hasattr(module, "mean_over_ranks"):  # a norm
            norm: Any = module
            norm.width //= device_mesh.size()
            norm.mean_over_ranks = functools.partial(_mean, mesh=device_mesh)
        spread: dict[str, Any] = {}  # parameters, while the module computes

        def enter(module: Any, _: tuple) -> None:
            spread.update(module._parameters)
            module._parameters.update({name: _local(x) for name, x in spread.items() if x is not None})

        def leave(module: Any, _: tuple, y: Any) -> Any:
            module._parameters.update(spread)
            spread.clear()
            return _summed(y, device_mesh) if self.placement == ROWS else y

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


def _spread(module: nn.Module, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> None:
    """Makes DTensors of the parameters that a module itself has."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))


def _local(parameter: DTensor) -> Tensor:
    """Returns this rank's shard of a parameter; the gradients of a replicated parameter are summed over the ranks."""
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


def _read_by_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns x as a local tensor whose gradients are summed over the ranks."""
    x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum of all ranks' y."""
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _mean(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the mean of all ranks' x, whose gradients are summed over the ranks."""
    return _read_by_all(_summed(x, mesh), mesh) / mesh.size()
