"""Makes flash-linear-attention's models compute gated linear attention and delta rules here, with one line before or
after they are created.

Besides those of `fla.ops.gla` these are the functions with one gate for each head or none. Functions that are composed
of several calls are computed here on a CPU and, where they were measured, on Hopper. On other GPUs they are left to
flash-linear-attention, whose kernels take less work; among these, LightNet and normalized linear attention call
functions that are replaced. Sequences in float32 are left to it as well, unless TF32 is allowed: it multiplies TF32 in
any case, which is faster.

The functions are replaced in the modules that define them, so modules that are imported later find the replacements.
They are also replaced in every module of flash-linear-attention that has imported them already. Some are registered as
its backends too, which reaches other modules; see registry.py. A call that this package does not compute goes to the
original function. Replacements hold for all threads, until the last `Acceleration` that asked for them is undone.

If all functions are replaced at once, flash-linear-attention's GLA layer passes each key/value head once instead of
once per query head: the `repeat` that it calls is replaced in the layer's module. Cached states keep all query heads.

Its layers pass the offsets of packed sequences to every function except `fused_chunk_gla`; padded sequences are packed
too. Layers in mode "fused_chunk" therefore run in mode "chunk", which computes the same.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_core.compat import hopper
from gla_core.compat.fla import composed, delta, heads, on_cpu, ops, registry, slots
from gla_core.compat.replace import COMPUTED, LOCK, Acceleration, LeftOut, Replacement, parameters, replacement
from gla_core.dispatch.errors import check_known

HOMES: Mapping[str, Mapping[str, Callable]] = {
    "fla.ops.gla": {
        "chunk_gla": ops.chunk_gla,
        # Its layers keep states [N, H, V, K] but do not pass state_v_first here; the original always raises in 0.6.0.
        "fused_chunk_gla": functools.partial(ops.chunk_gla, state_v_first=True),
        "fused_recurrent_gla": ops.fused_recurrent_gla,
    },
    "fla.ops.simple_gla": {
        "chunk_simple_gla": heads.chunk_simple_gla,
        "fused_chunk_simple_gla": heads.fused_chunk_simple_gla,
        "fused_recurrent_simple_gla": heads.fused_recurrent_simple_gla,
        "parallel_simple_gla": heads.parallel_simple_gla,
    },
    "fla.ops.retention": {
        "chunk_retention": heads.chunk_retention,
        "fused_chunk_retention": heads.fused_chunk_retention,
        "fused_recurrent_retention": heads.fused_recurrent_retention,
        "parallel_retention": heads.parallel_retention,
    },
    "fla.ops.lightning_attn": {
        "chunk_lightning_attn": heads.chunk_lightning_attn,
        "fused_recurrent_lightning_attn": heads.fused_recurrent_lightning_attn,
    },
    "fla.ops.linear_attn": {
        "chunk_linear_attn": heads.chunk_linear_attn,
        "fused_chunk_linear_attn": heads.fused_chunk_linear_attn,
        "fused_recurrent_linear_attn": heads.fused_recurrent_linear_attn,
    },
    "fla.ops.lightnet": {
        "chunk_lightnet": composed.chunk_lightnet,
        "fused_recurrent_lightnet": composed.fused_recurrent_lightnet,
    },
    "fla.ops.gsa": {"chunk_gsa": slots.chunk_gsa, "fused_recurrent_gsa": slots.fused_recurrent_gsa},
    "fla.ops.rwkv6": {"chunk_rwkv6": composed.chunk_rwkv6, "fused_recurrent_rwkv6": composed.fused_recurrent_rwkv6},
    "fla.ops.kda": {"chunk_kda": delta.chunk_kda, "fused_recurrent_kda": delta.fused_recurrent_kda},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": delta.chunk_gated_delta_rule,
        "chunk_gdn": delta.chunk_gdn,
        "fused_recurrent_gated_delta_rule": delta.fused_recurrent_gated_delta_rule,
        "fused_recurrent_gdn": delta.fused_recurrent_gdn,
    },
    "fla.ops.delta_rule": {
        "chunk_delta_rule": delta.chunk_delta_rule,
        "fused_recurrent_delta_rule": delta.fused_recurrent_delta_rule,
    },
}
"""Functions that are computed here, by the module that has the original and then by name."""
FUNCTIONS: Mapping[str, Callable] = {name: function for home in HOMES.values() for name, function in home.items()}
_GLA, _LAYER = "fla.ops.gla", "fla.layers.gla"
_INSTALL = "install 0.6.0: pip install 'flash-linear-attention==0.6.0' 'transformers<5.24'"
_MODE = "_gla_core_mode"
_LAYERS_WITH_MODES = {_LAYER: "GatedLinearAttention", "fla.layers.hgrn2": "HGRN2Attention"}


def accelerate(*functions: str, cpu: bool = False) -> Acceleration:
    """Replaces functions of `fla.ops` in all modules of flash-linear-attention, also in those imported later.

    Args:
        functions: names among `FUNCTIONS`; all by default. Functions that are replaced already stay replaced. With
            "fused_chunk_gla", flash-linear-attention's GLA and HGRN2 layers in mode "fused_chunk" run in mode "chunk".
        cpu: whether to compute in PyTorch, for tensors on a CPU, the other functions that flash-linear-attention's GLA,
            HGRN2, KDA, GatedDeltaNet and DeltaNet models have only in Triton; see on_cpu.py.

    Returns:
        The replacements that were made. Print it to see them, and call `undo` to remove them; as a context manager it
        removes them at its end.

    Warns:
        UserWarning: flash-linear-attention is not 0.6; transformers is 5.24 or newer, under which
            flash-linear-attention's own `generate` is wrong; there is no GPU, and `cpu` and `functions` are left out.

    Raises:
        ImportError: flash-linear-attention is not installed, or lacks a module.
        ValueError: a name is not among `FUNCTIONS`.

    Example:
        >>> print(accelerate())
        >>> with accelerate("chunk_gla"):
        ...     model(tokens)
    """
    for name in functions:
        check_known("function", name, FUNCTIONS)
    for warning in _import_fla(whole_models=not functions and not cpu):
        warnings.warn(warning, stacklevel=2)
    names = set(functions) or FUNCTIONS.keys()
    with LOCK:
        wanted: list[Replacement | _ModeOfLayers] = [
            _replacement(home, name, function, *_PARTLY.get(home, (_left_out, COMPUTED)))
            for home, members in HOMES.items()
            for name, function in members.items()
            if name in names
        ]
        for home, members in on_cpu.REPLACED.items() if cpu else ():
            wanted += [_replacement(home, name, function, _not_on_cpu, COMPUTED) for name, function in members.items()]
        if HOMES[_GLA].keys() <= names:
            how = "left out for key/value heads"
            wanted.append(_replacement(_LAYER, "repeat", _heads, _not_of_heads, how, within=_LAYER))
        if "fused_chunk_gla" in names:
            for home, name in _LAYERS_WITH_MODES.items():
                layer = getattr(importlib.import_module(home), name)
                wanted.append(getattr(layer.forward, _MODE, None) or _ModeOfLayers(layer))
        return Acceleration("flash-linear-attention", wanted, NOTE)


use_gla_core = accelerate
"""`accelerate`, under a name that does not hide Hugging Face's package `accelerate`."""


def _import_fla(whole_models: bool) -> list[str]:
    """Imports flash-linear-attention, and returns what its user has to know of it."""
    try:
        importlib.import_module(_GLA)
    except ModuleNotFoundError as error:
        if not error.name or not _GLA.startswith(error.name):  # FLA is installed, and lacks another package
            raise
        raise ImportError(f"accelerate() finds no module {error.name}; {_INSTALL}") from None
    said, fla = [], _version("fla")
    if fla not in (None, (0, 6)):
        said.append(f"flash-linear-attention is {sys.modules['fla'].__version__}; accelerate() knows 0.6: {_INSTALL}")
    elif (_version("transformers") or ()) >= (5, 24):
        said.append(
            "flash-linear-attention's own `generate` forgets its cache under transformers 5.24 and newer, so its text "
            "is wrong: pip install 'transformers<5.24', or pass use_cache=False"
        )
    if whole_models and not (torch.cuda.is_available() or torch.xpu.is_available()):
        said.append(
            "there is no GPU, and flash-linear-attention's norms, convolutions and losses need one: "
            "accelerate(cpu=True) computes them on a CPU"
        )
    return said


def _version(module: str) -> tuple[int, ...] | None:
    """Returns the first two numbers of the version of a module; None if it is not imported or has no version."""
    numbers = re.match(r"(\d+)\.(\d+)", getattr(sys.modules.get(module), "__version__", ""))
    return numbers and tuple(map(int, numbers.groups()))


class _ModeOfLayers:
    """The mode in which a class of layers runs: "chunk" if the layer's mode is "fused_chunk", otherwise its mode.

    The layer's attribute changes for the time of its forward. A property in its place would read the attribute from the
    layer's `__dict__`, which torch.compile of PyTorch 2.11 cannot.
    """

    name, how = "mode", "'fused_chunk' runs as 'chunk'"

    def __init__(self, layer: type) -> None:
        self.layer, self.original = layer, layer.forward
        self.holders: list[Acceleration] = []

    def put(self) -> tuple[str, ...]:
        """Replaces the class's forward; returns the name of its module."""
        original = self.original

        @functools.wraps(original)
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer.mode != "fused_chunk":
                return original(layer, *args, **kwargs)
            layer.mode = "chunk"
            try:
                return original(layer, *args, **kwargs)
            finally:
                layer.mode = "fused_chunk"

        vars(forward)[_MODE] = self
        self.layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        return (self.layer.__module__,)

    def remove(self) -> None:
        """Puts the class's own forward back."""
        self.layer.forward = self.original  # pyright: ignore[reportAttributeAccessIssue]


def _replacement(
    home: str,
    name: str,
    function: Callable,
    left_out: LeftOut,
    how: str,
    within: str = "fla",
) -> Replacement:
    call = _for_query_heads(function) if home == _GLA else function
    new = replacement(importlib.import_module(home), name, call, left_out, within, how)
    registry.register(new)
    return new


def _for_query_heads(function: Callable) -> Callable:
    """Wraps a function so that its states have one head per query head, even if k and v have fewer heads than q."""

    @functools.wraps(function, updated=())
    def call(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if q.shape[2] == k.shape[2]:
            return function(q, k, *args, **kwargs)
        arguments, groups = {**dict(zip(names, (q, k, *args), strict=False)), **kwargs}, q.shape[2] // k.shape[2]
        state = arguments.pop("initial_state", None)
        o, state = function(**arguments, initial_state=None if state is None else state[:, ::groups])
        return o, None if state is None else state.repeat_interleave(groups, 1)

    names = parameters(function)
    return call


def _heads(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Splits a tensor [..., h * d] into heads [..., h, d], without repeating them."""
    return tensor.unflatten(-1, (-1, sizes["d"]))


def _not_of_heads(arguments: Mapping[str, Any]) -> str | None:
    if arguments.get("pattern") != "... (h d) -> ... (h g) d":
        return "not a repeat of heads"
    return _faster_there(arguments.get("tensor"))


def _left_out(arguments: Mapping[str, Any]) -> str | None:
    return _more(arguments) or _faster_there(arguments.get("q"))


def _more(arguments: Mapping[str, Any]) -> str | None:
    """Returns what a call asks for that no function here computes; None if there is no such thing."""
    return delta.left_out(arguments) or ("output_attentions" if arguments.get("output_attentions") else None)


def _faster_there(x: Any) -> str | None:
    """Returns a reason if sequences x [B, T, ...] are on a GPU, in float32 that is multiplied here without TF32.

    The kernels here then use no matrix units. Those of flash-linear-attention multiply TF32 whatever PyTorch allows.
    """
    if not isinstance(x, Tensor) or not x.is_cuda or x.dtype != torch.float32 or x.shape[1] == 1:
        return None
    # unlike the matmul precision, torch.compile can read this
    if torch.backends.cuda.matmul.allow_tf32 or torch.is_autocast_enabled("cuda"):
        return None
    return 'float32 on a GPU, under the matmul precision "highest"'


def _not_on_cpu(arguments: Mapping[str, Any]) -> str | None:
    is_on_cpu = all(x.device.type == "cpu" for x in arguments.values() if isinstance(x, Tensor))
    return None if is_on_cpu else "not on a CPU"


def _slow_delta_rule(arguments: Mapping[str, Any]) -> str | None:
    def is_measured() -> bool:
        g = arguments.get("g") if arguments.get("gk") is None else arguments["gk"]
        return hopper.computes_delta_rule(arguments["q"], arguments["v"], g)

    return _more(arguments) or _not_measured(arguments, is_measured, hopper.IN_WORDS)


def _on_hopper(arguments: Mapping[str, Any]) -> str | None:
    queries = arguments["r" if "r" in arguments else "q"]  # r in RWKV-6
    return _not_measured(arguments, lambda: hopper.is_bfloat16_on_hopper(queries), ON_HOPPER)


def _slots(arguments: Mapping[str, Any]) -> str | None:
    def is_measured() -> bool:
        q, v = arguments["q"], arguments["v"]
        is_narrow = max(q.shape[3], v.shape[3]) <= 128
        return (is_narrow or q.shape[1] > 1) and hopper.is_bfloat16_on_hopper(q)

    return _not_measured(arguments, is_measured, SLOTS)


def _not_measured(arguments: Mapping[str, Any], is_measured: Callable[[], bool], words: str) -> str | None:
    """Returns a reason if a call is neither on a CPU nor one of those, as `words` say, that were measured."""
    return None if _not_on_cpu(arguments) is None or is_measured() else hopper.neither(words)


def _several_calls(arguments: Mapping[str, Any]) -> str | None:
    on_gpu = _not_on_cpu(arguments)
    if on_gpu is None or arguments.get("normalize") is False:
        return on_gpu and _left_out(arguments)
    return "normalize, not on a CPU"


ON_HOPPER = "on Hopper in bfloat16"
SLOTS = "on Hopper in bfloat16 (one token: K, V up to 128)"
_HERE = "computed by gla_core on a CPU and {}, else the original"
_PARTLY = {
    "fla.ops.linear_attn": (_several_calls, "computed by gla_core on a CPU, and on a GPU with normalize=False"),
    "fla.ops.lightnet": (_on_hopper, _HERE.format(ON_HOPPER)),
    "fla.ops.gsa": (_slots, _HERE.format(SLOTS)),
    "fla.ops.rwkv6": (_on_hopper, _HERE.format(ON_HOPPER)),
    "fla.ops.kda": (_slow_delta_rule, _HERE.format(hopper.IN_WORDS)),
    "fla.ops.gated_delta_rule": (_slow_delta_rule, _HERE.format(hopper.IN_WORDS)),
    "fla.ops.delta_rule": (_slow_delta_rule, _HERE.format(hopper.IN_WORDS)),
}
"""For modules whose calls are chosen in another way: why one is left to the original, and a line for the report."""
NOTE = (
    "gates of values (gv), a beta for each value, cp_context, return_intermediate_states and output_attentions are "
    'left to the original; on a GPU, so are sequences in float32 under the matmul precision "highest"'
)
