"""Random inputs for the GLA ops, from a seed: every dtype, gate strength and layout that a backend must serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GATES = ("none", "mild", "strong", "extreme", "-inf")


@dataclass(frozen=True, slots=True)
class GlaInputs:
    """Arguments of `chunk_gla`, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def gate(shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Log forget gates, on the generator's device.

    Args:
        shape: [B, T, H, K].
        kind: 'none' (None), 'mild' (logsigmoid / 16, as in the layer), 'strong' (logsigmoid), 'extreme' (0 to -100),
            or '-inf' (2 % of the gates are -inf, the rest from mild to extreme).
    """
    if kind == "none":
        return None
    log_sigmoid = torch.nn.functional.logsigmoid(normal(shape, dtype, generator))
    if kind == "mild":
        return log_sigmoid / 16
    if kind == "strong":
        return log_sigmoid
    uniform = torch.rand(shape, generator=generator, dtype=dtype, device=generator.device)
    if kind == "extreme":
        return -100 * uniform
    if kind != "-inf":
        raise ValueError(f"gate kind is {kind!r}; expected one of {GATES}")
    return torch.where(uniform < 0.02, -torch.inf, torch.where(uniform < 0.1, -100 * uniform, log_sigmoid / 16))


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Standard normal numbers on the generator's device, drawn in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.randn(shape, generator=generator, dtype=wide, device=generator.device).to(dtype)


def gla_inputs(
    *,
    B: int = 2,
    T: int = 100,
    H: int = 2,
    G: int = 1,
    K: int = 16,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    gates: str = "mild",
    lengths: tuple[int, ...] | None = None,
    padding: int = 0,
    initial_state: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> GlaInputs:
    """Inputs of `chunk_gla`; the same for the same arguments.

    Args:
        G: query heads per key/value head. gate_dtype: dtype of g, by default as q.
        lengths: packs sequences of these lengths; B and T then follow from them. padding: rows after the last one.
        initial_state: whether there is one.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, T, N = (B, T, B) if lengths is None else (1, sum(lengths) + padding, len(lengths))
    q, k, v = (normal(shape, dtype, generator) for shape in ((B, T, H * G, K), (B, T, H, K), (B, T, H, V)))
    g = gate((B, T, H, K), gates, gate_dtype or dtype, generator)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    state = normal((N, H, K, V), state_dtype, generator) if initial_state else None
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=device).cumsum(0)
    return GlaInputs(q, k, v, g, state, offsets)
