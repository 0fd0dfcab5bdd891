"""Calls of the model without gradients as CUDA graphs, captured without being asked for.

    first calls of one shape    computed as usual
    then                        captured: the words are read from one place, the states are at fixed addresses
    from then on                words copied to that place, the graph replayed, the result copied from its place

States at fixed addresses, with the graphs that read and write them, are a `Slot`. A cache takes a free slot of its
number of sequences, and keeps its states there. So one capture serves one generation after the other.
Prompts are read in pieces of a few lengths, of which the first may begin with padding.

What a graph holds is what was captured. So only plain modules of known classes are captured, and a model whose modules
or addresses have changed loses its graphs.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gla_core.extension import RMSNormGated, ShortConvolution, bypasses_torch, current_request, environment, is_plain
from gla_core.nn import HGRN2, GatedLinearAttention
from gla_transformers.cache import GLACache, RecurrentStates

BEFORE = 3
"""Number of calls of one shape that are computed as usual before one is captured."""
MOST_SLOTS = 4
MOST_PIECES = 16
"""Number of graphs of a slot: up to 9 for calls of the model, and those for loops."""
LENGTHS = (2048, 512, 128, 32)
"""Lengths of the pieces of prompts."""
MOST_TOKENS = 4096
"""Number of tokens of all sequences up to which a prompt takes a GPU less time than the host takes for its launches."""
SPARE_TOKENS = 512
"""Padding of all sequences that takes about as long as another piece."""
SPARE_MEMORY = 0.05
"""The part of a GPU's memory that has to be free. With less there are no graphs."""
STEP = (1, False)
"""The key of a call of one token of each row."""
_ALIKE = (nn.ModuleList, nn.Sequential, nn.Linear)
"""Classes of modules without options that change what they compute."""
_KNOWN = {*_ALIKE, nn.Embedding, GatedLinearAttention, HGRN2, RMSNormGated, ShortConvolution}
_OPTIONS = (bool, int, float, str, type(None))

Compute = Callable[[Tensor, Tensor | None, GLACache], Tensor]
"""Maps words [B, T], a mask [B, T] and a cache to hidden states [B, T, hidden_size]; adds the words to the cache."""
Call = Callable[[Sequence[Tensor], Any], Tensor]
"""The function that a graph computes from its inputs and a `GLACache` or `RecurrentStates`."""


class CUDAReplay:
    """A call captured in a CUDA graph.

    Args:
        call: computes a tensor from memory that stays where it is.
        device: the device of this memory.
        beside: another capture, which shares memory with this one; they are never replayed at the same time.
    """

    def __init__(self, call: Callable[[], Tensor], device: torch.device, beside: CUDAReplay | None) -> None:
        self.graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.graph.pool()
        # "thread_local": other threads may go on allocating, and wait for the device.
        how: Any = {"pool": pool, "stream": _stream(device), "capture_error_mode": "thread_local"}
        with torch.cuda.device(device), torch.cuda.graph(self.graph, **how):
            self.result = call()

    def __call__(self) -> Tensor:
        """Computes the call again, and returns its result, which the next call of a graph may overwrite."""
        self.graph.replay()
        return self.result


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which calls are captured: one for all, as each stream gets a workspace for products."""
    return torch.cuda.Stream(device)


CAPTURES: dict[str, Callable[..., Callable[[], Tensor]]] = {"cuda": CUDAReplay}
"""Captures calls on each type of device; on others every call is computed as usual."""


class Setting(NamedTuple):
    """Describes what calls that share a slot have in common."""

    sequences: int
    device: torch.device
    stream: int
    inference: bool
    request: Hashable
    precision: str
    deterministic: bool


class Piece(NamedTuple):
    """A captured call: where it reads its inputs, and what computes it."""

    inputs: Sequence[Tensor]
    replay: Callable[[], Tensor]


class Slot:
    """States at fixed addresses, and graphs that read and write them.

    Attributes:
        cache: a cache that has the states. It is not the cache of any caller.
        pieces: the graphs, the last used one at the end. For calls of the model, the key is the number of tokens and
            whether there is a mask.
    """

    def __init__(self, setting: Setting, cache: Any) -> None:
        self.setting, self.cache, self.places = setting, cache.sharing(), _places(cache.tensors())
        self.pieces: dict[Hashable, Piece] = {}

    def holds(self, cache: Any) -> bool:
        """Returns whether a cache uses the states of the slot."""
        return _places(cache.tensors()) == self.places

    def is_free(self) -> bool:
        """Returns whether no cache has the states, and nobody has kept a tensor of them, or a view of one."""
        alone = _users(torch.empty(1, device="cpu"))
        return all(_users(tensor) == alone for tensor in self.cache.tensors())

    def give(self, cache: Any) -> bool:
        """Moves the states of a cache into the slot; returns False if they do not fit."""
        old, new = cache.tensors(), self.cache.tensors()
        if cache.kind() != self.cache.kind():
            return False
        if not old:
            torch._foreach_zero_(new)  # pyright: ignore[reportPrivateImportUsage]
        elif [(x.shape, x.dtype) for x in old] == [(x.shape, x.dtype) for x in new]:
            torch._foreach_copy_(new, old)  # pyright: ignore[reportPrivateImportUsage]
        else:
            return False
        self.cache.share_with(cache)
        return True


class Graphs:
    """The graphs of a model.

    Args:
        classes: classes of the model's modules that can be captured, beside those of PyTorch and of gla_core.
    """

    def __init__(self, *classes: type[nn.Module]) -> None:
        self.classes = classes
        self.slots: list[Slot] = []  # the last one was used last
        self.counts: Counter[Hashable] = Counter()
        self.failed: set[Hashable] = set()
        self.watch: _Watch | None = None
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:  # a copy of a model begins without graphs
        return Graphs, self.classes

    def drop(self) -> None:
        """Forgets all graphs. Caches keep their states."""
        self.slots, self.watch = [], None
        self.counts.clear()
        self.failed.clear()

    def read(self, model: nn.Module, compute: Compute, words: Tensor, mask: Tensor | None, cache: Any) -> Tensor | None:
        """Returns `compute(words, mask, cache)` by replaying graphs; None if the call has to be computed as usual.

        Args:
            model: the module of whose modules and parameters `compute` depends.
            words: [B, T].
            mask: [B, T or more], 0 at padding.
        """
        if not _can_be_captured(words, cache):
            return None
        with self.lock:
            return self._read(model, compute, words, mask, cache)

    def repeat(
        self, model: nn.Module, call: Call, inputs: Sequence[Tensor], n: int, what: Hashable, cache: Any
    ) -> Tensor | None:
        """Returns `call(inputs, cache)` for n new tokens of each row by a graph; None if it has to be called as usual.

        Args:
            model: as in `read`.
            inputs: tensors that `call` reads and writes; the first one has shape [B].
            what: what `call` computes, apart from n and the values of `inputs`.
        """
        words = inputs[0][:, None]
        if not _can_be_captured(words, cache):
            return None
        with self.lock:
            form = (n, False, what)
            slot = self._slot(model, words, None, cache, ("repeated", n))
            result = None if slot is None else self._piece(slot, form, inputs, call)
            if slot is not None and result is not None:
                _copy(inputs, slot.pieces[form].inputs)
            return result

    def _read(
        self, model: nn.Module, compute: Compute, words: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor | None:
        B, T = words.shape
        slot = self._slot(model, words, mask, cache, (STEP, 1))
        if slot is None or (T == 1 and mask is not None):
            return None
        if T > 1 and (not _in_pieces(T, B) or current_request(None).batch_invariant is not None):
            return None
        outputs = []

        def call(there: Sequence[Tensor], cache: GLACache) -> Tensor:
            return compute(there[0], there[1] if len(there) > 1 else None, cache)

        for part, seen in [(words, mask)] if T == 1 else pieces(words, mask):
            inputs = [part] if seen is None else [part, seen]
            form = (part.shape[1], seen is not None)
            x = self._piece(slot, form, inputs, call)
            outputs.append(call(inputs, cache) if x is None else x)
        return torch.cat(outputs, 1)[:, -T:]

    def _slot(
        self, model: nn.Module, words: Tensor, mask: Tensor | None, cache: Any, use: tuple[Hashable, int]
    ) -> Slot | None:
        """Returns the slot whose states a cache has, or takes for this call; a new one after enough tokens of a use."""
        (B, T), setting = words.shape, _setting(words)
        if (setting, STEP) in self.failed:
            return None
        slot = next((slot for slot in self.slots if slot.holds(cache)), None)
        if not self._is_unchanged(model, words.device, thoroughly=slot is None or T > 1):
            return None
        if slot is None and (T == 1 or _in_pieces(T, B)):  # a free one, into which the states move
            fitting = (slot for slot in self.slots if slot.setting == setting and slot.is_free())
            slot = next((slot for slot in fitting if slot.give(cache)), None)
        if slot is None and T == 1 and cache.tensors() and mask is None:
            slot = self._made(setting, cache, *use)
        if slot is None or slot.setting != setting:
            return None
        self.slots.append(self.slots.pop(self.slots.index(slot)))
        return slot

    def _is_unchanged(self, model: nn.Module, device: torch.device, thoroughly: bool) -> bool:
        """Returns whether the graphs are of this model as it is, and it can be captured; forgets them if not."""
        if thoroughly:
            if self.watch is None or self.watch.has_changed(device) or _short_of_memory(device):
                self.drop()
                self.watch = _Watch(model, device, _KNOWN.union(self.classes))
        elif self.watch is not None and self.watch.has_moved():
            self.drop()
        return self.watch is not None and self.watch.can_be_captured

    def _made(self, setting: Setting, cache: Any, use: Hashable, tokens: int) -> Slot | None:
        """Returns a new slot of a cache's states, once enough of its tokens have been computed."""
        key = (setting, use)
        self.counts[key] += tokens
        if self.counts[key] <= BEFORE or _short_of_memory(setting.device):
            return None
        self.slots = [*self.slots[-(MOST_SLOTS - 1) :], Slot(setting, cache)]
        return self.slots[-1]

    def _piece(self, slot: Slot, form: Hashable, inputs: Sequence[Tensor], call: Call) -> Tensor | None:
        """Returns `call(inputs, cache)` by a graph; None the first times, when it has to be called as usual."""
        piece = slot.pieces.get(form)
        if piece is None:
            key = (slot.setting, form)
            self.counts[key] += 1
            if self.counts[key] > BEFORE and key not in self.failed:
                piece = self._captured(slot, form, inputs, call)
            if piece is None:
                return None
            if len(slot.pieces) == MOST_PIECES:
                del slot.pieces[next(iter(slot.pieces))]
        slot.pieces.pop(form, None)
        slot.pieces[form] = piece
        _copy(piece.inputs, inputs)
        return piece.replay().clone()

    def _captured(self, slot: Slot, form: Hashable, inputs: Sequence[Tensor], call: Call) -> Piece | None:
        """Returns a capture; None if the call cannot be captured, which is then not tried again."""
        there, cache = [x.clone() for x in inputs], slot.cache
        beside = next((piece.replay for piece in slot.pieces.values()), None)
        try:
            device = slot.setting.device
            replay = CAPTURES[device.type](lambda: call(there, cache), device, beside)
        except Exception:  # of many classes; computed as usual, the call raises what concerns the user
            self.failed.add((slot.setting, form))
            return None
        return Piece(there, replay)


def _copy(to: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for dtype in dict.fromkeys(x.dtype for x in to):  # each in one launch
        pairs = [pair for pair in zip(to, inputs, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])  # pyright: ignore[reportPrivateImportUsage]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _users(tensor: Tensor) -> int:
    """Returns how often the memory of a tensor is held, by tensors and by what this function holds itself."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def pieces(words: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Cuts words [B, T] and a mask [B, T or more] into pieces as long as graphs, the first one padded in front."""
    B, T = words.shape
    cut = lengths(T, B)
    padding = sum(cut) - T
    seen = words.new_ones(B, T) if mask is None else mask[:, mask.shape[1] - T :]
    parts = (F.pad(x, (padding, 0)).split(cut, 1) for x in (words, seen))
    for i, (part, where) in enumerate(zip(*parts, strict=True)):
        masked = mask is not None or (padding > 0 and i == 0)
        yield part, where if masked else None


def lengths(T: int, B: int) -> list[int]:
    """Returns the lengths of the pieces of B prompts of T tokens; all but the first are whole."""
    left, pieces = T, []
    usable = [length for length in LENGTHS if length * B <= MOST_TOKENS]
    while left > 0:
        over = [length for length in usable if length >= left and (length - left) * B <= SPARE_TOKENS]
        under = [length for length in usable if length <= left]
        pieces.append(over[-1] if over else under[0] if under else usable[-1])
        left -= pieces[-1]
    return pieces[::-1]


def _in_pieces(T: int, B: int) -> bool:
    return T * B <= MOST_TOKENS and LENGTHS[-1] * B <= MOST_TOKENS


def _can_be_captured(words: Tensor, cache: Any) -> bool:
    """Returns whether a call reads words into a cache in a way that graphs can repeat, whatever the model."""
    if words.device.type not in CAPTURES or torch.is_grad_enabled() or not bypasses_torch(words) or words.ndim != 2:
        return False
    if type(cache) not in (GLACache, RecurrentStates) or cache.compileable or not words.numel():
        return False
    capturing = words.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (capturing or _has_any_global_hook() or environment().check_values)


def _setting(words: Tensor) -> Setting:
    stream = torch.cuda.current_stream(words.device).cuda_stream if words.is_cuda else 0
    inference, request = torch.is_inference_mode_enabled(), current_request(None).spec
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return Setting(words.shape[0], words.device, stream, inference, request, precision, deterministic)


def _short_of_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    if free < SPARE_MEMORY * total:  # rarely, as PyTorch takes long to say what it keeps
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free < SPARE_MEMORY * total


class _Watch:
    """A model as it is: its modules, their options and parameters, and whether it can be captured.

    Making one takes milliseconds. The checks compare what it has kept, in a fraction of one.
    """

    def __init__(self, model: nn.Module, device: torch.device, classes: set[type]) -> None:
        self.device = device
        self.modules = [module for module in model.modules() if module is not model]
        self.kinds = [type(m) for m in self.modules]
        self.hooks = [hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooked = any(self.hooks)
        with_options = [vars(m) for m in self.modules if type(m) not in _ALIKE]
        self.options = [(d, name) for d in with_options for name, value in d.items() if type(value) in _OPTIONS]
        self.values = [d[name] for d, name in self.options]
        whole = (model, *self.modules)
        self.parts = [d for m in whole for d in (m._modules, m._parameters, m._buffers) if d]
        self.ids = [id(x) for d in self.parts for x in d.values()]
        tensors = [x for m in whole for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        self.can_be_captured = all(type(x) in (nn.Parameter, Tensor) and x.device == device for x in tensors) and all(
            is_plain(m, *classes) and not m.training for m in self.modules
        )
        self.tensors = tensors if self.can_be_captured else []
        self.places = _places(self.tensors)

    def has_moved(self) -> bool:
        """Returns whether parameters have other addresses, or there are other hooks: the check for each token."""
        return any(self.hooks) != self.hooked or _places(self.tensors) != self.places

    def has_changed(self, device: torch.device) -> bool:
        """Returns whether anything has changed: the check for each prompt."""
        return (
            self.has_moved()
            or device != self.device
            or [id(x) for d in self.parts for x in d.values()] != self.ids
            or [d.get(name) for d, name in self.options] != self.values
            or list(map(type, self.modules)) != self.kinds
            or (self.can_be_captured and any("forward" in vars(m) for m in self.modules))
        )
