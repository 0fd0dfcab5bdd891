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
    """Log forget gates.

    Args:
        shape: [B, T, H, K].
        kind: 'none' (None), 'mild' (logsigmoid / 16, as in the layer), 'strong' (logsigmoid), 'extreme' (0 to -100),
            or '-inf' (2 % of the gates are -inf, the rest from mild to extreme).
    """
    if kind == "none":
        return None
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    log_sigmoid = torch.nn.functional.logsigmoid(logits)
    if kind == "mild":
        return (log_sigmoid / 16).to(dtype)
    if kind == "strong":
        return log_sigmoid.to(dtype)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "extreme":
        return (-100 * uniform).to(dtype)
    if kind != "-inf":
        raise ValueError(f"gate kind is {kind!r}; expected one of {GATES}")
    mixed = torch.where(uniform < 0.02, -torch.inf, torch.where(uniform < 0.1, -100 * uniform, log_sigmoid / 16))
    return mixed.to(dtype)


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
    initial_state: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> GlaInputs:
    """Inputs of `chunk_gla`; the same for the same arguments, on every device.

    Args:
        G: query heads per key/value head. gate_dtype: dtype of g, by default as q.
        lengths: packs sequences of these lengths; B and T then follow from them.
        initial_state: whether there is one.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T, N = (B, T, B) if lengths is None else (1, sum(lengths), len(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v = normal(B, T, H * G, K), normal(B, T, H, K), normal(B, T, H, V)
    g = gate((B, T, H, K), gates, gate_dtype or dtype, generator)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    state = torch.randn(N, H, K, V, generator=generator, dtype=torch.float64).to(device, state_dtype)
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=device).cumsum(0)
    return GlaInputs(q, k, v, None if g is None else g.to(device), state if initial_state else None, offsets)
