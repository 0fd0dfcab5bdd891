"""What the forget gates of a layer are to its ops."""

from __future__ import annotations

from typing import Any

from gla_core.nn.interface import RecurrentLayer


def gate_options(layer: RecurrentLayer) -> dict[str, Any]:
    """Returns the arguments of the ops that say what the layer's g holds."""
    if layer.gate_normalizer is None:
        return {}
    return {"gate": "logsigmoid", "gate_normalizer": layer.gate_normalizer}
