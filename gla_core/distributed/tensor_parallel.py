"""Tensor parallelism over the heads of a layer: each rank computes some of them, with one sum of ranks each way.

    x, whole on every rank -> this rank's heads: projections, convolutions, gates, op and norm -> its part of the output

The outputs of all ranks are summed, and backwards their gradients of x. Parameters are DTensors, for optimizers and
checkpoints; a module computes with what this rank has of them, plain tensors, so that layers need not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
PLACEMENTS: Mapping[str, Placement] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), COLUMNS),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), COLUMNS),  # of each channel alone
    "gk_proj.0": WHOLE,  # to a width that all heads share, and a small one
    "gk_proj.1": COLUMNS,
    **dict.fromkeys(("g_norm", "g_norm_swish_gate"), WHOLE),  # of each head alone, with one weight for all
    "o_proj": ROWS,
}
"""Of the parameters of the modules of a layer; a linear layer has its outputs in dimension 0."""


def tensor_parallel_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Say for `parallelize_module` how a `GatedLinearAttention` is spread over ranks by its heads.

    Every rank then calls the layer with the same x, whole, and gets the whole y. Its `num_heads`, `num_kv_heads` and
    states are those of the rank's heads. All that the layer does works, `context_parallel` over other ranks included.

    Raises:
        TypeError: another layer. ValueError, by `parallelize_module`: num_kv_heads is no multiple of the ranks.

    Example:
        >>> mesh = init_device_mesh("cuda", (2,))
        >>> parallelize_module(layer, mesh, tensor_parallel_plan(layer))
    """
    modules = [name for name, module in layer.named_modules() if module._parameters]
    if not modules or not PLACEMENTS.keys() >= set(modules):
        raise TypeError(f"layer is {type(layer).__name__}; expected a GatedLinearAttention")
    return {"": _OwnHeads(), **{name: _Spread(PLACEMENTS[name]) for name in modules}}


class _OwnHeads(ParallelStyle):
    """Of a layer: its sizes become those of this rank, and the ranks' gradients of its input are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        ranks = device_mesh.size()
        if layer.num_kv_heads % ranks:
            raise ValueError(f"num_kv_heads is {layer.num_kv_heads}; expected a multiple of the mesh's {ranks} ranks")
        layer.num_heads //= ranks
        layer.num_kv_heads //= ranks
        for convolution in layer.convolutions:
            convolution.width //= ranks

        def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (_read_by_all(args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"x": _read_by_all(kwargs["x"], device_mesh)}

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class _Spread(ParallelStyle):
    """Of a module without children: its parameters are spread over ranks, and it computes with those of this rank."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            of_all = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(of_all, parameter.requires_grad))
        spread: dict[str, Any] = {}  # parameters, while the module computes

        def enter(module: Any, _: tuple) -> None:
            spread.update(module._parameters)
            module._parameters.update({name: _own(x) for name, x in spread.items() if x is not None})

        def leave(module: Any, _: tuple, y: Any) -> Any:
            module._parameters.update(spread)
            spread.clear()
            return _summed(y, device_mesh) if self.placement == ROWS else y

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


def _own(parameter: DTensor) -> Tensor:
    """What this rank has of a parameter; of one that all have whole each rank's gradient is a part of a sum."""
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


def _read_by_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, of which each rank's gradient is a part of a sum."""
    x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what all ranks have."""
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
