"""Makes Triton's interpreter more than twice as fast; results and checks stay the same.

    TRITON_INTERPRET=1 pytest tests                                        # conftest.py loads it
    TRITON_INTERPRET=1 PYTHONPATH=tests pytest -p quick_interpreter ...    # elsewhere

Interpreted kernels on a few tokens spend most of their time on these things, which this module does once or directly:

- The interpreter replaces the functions of `triton.language` at every call of a `triton.jit` function, nested ones
  included, and puts them back. A process that interprets keeps the replacements.
- It looks up the NumPy dtype of a Triton dtype in a table that it builds at every look-up.
- It makes the shape of every tensor and of every type of a block anew, of objects with types of their own.
- It checks every sum, difference and product of int32 for overflow by five interpreted operations on int64.
- It compares dtypes by their names, looks for a common dtype of equal ones, and for a common shape of equal ones.
- It copies the keyword arguments of every call, and looks at every value for constants in lists and tuples.
- It scans tensors number by number where no function of NumPy does what a kernel asks for.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replace_language, _numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_replaced: set[frozenset[str]] = set()
_numpy_dtypes: dict[str, np.dtype] = {}
_init_block_type = tl.block_type.__init__
_shapes: dict[tuple[int, ...], _Shapes] = {}
_SCALAR_SHAPE = tl.tuple([]), tl.constexpr(1)
_wants_tensors, _broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
_dtypes_are_equal, _unwrap = tl.dtype.__eq__, tl.core._unwrap_if_constexpr
_ON_INTEGERS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class _Kept:
    """Stands for a set of replacements, but never restores the originals."""

    def restore(self) -> None:
        pass


def _replace_language_once(function: FunctionType) -> _Kept:
    names = frozenset(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
    if names not in _replaced:
        _replaced.add(names)
        _replace_language(function)
    return _Kept()


def _remembered_numpy_dtype(dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(dtype)
    return _numpy_dtypes[name]


class _Shapes:
    """The shape and the number of elements of blocks, checked when first made; for their types, and for tensors."""

    def __init__(self, block: tl.block_type):
        self.as_type = block.shape, block.numel
        self.as_tensors = tl.tuple([tl.constexpr(size) for size in block.shape]), tl.constexpr(block.numel)


def _new_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    shapes = _shapes.get(sizes)
    if shapes is None or any(type(size) is not int for size in sizes):
        _init_block_type(self, element_ty, shape)
        shapes = _shapes[sizes] = _Shapes(self)
    self.element_ty, self.shapes = element_ty, shapes
    self.shape, self.numel = shapes.as_type


def _same_block_type(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if not isinstance(other, tl.block_type) or self.element_ty != other.element_ty:
        return False
    return self.shape is other.shape or bool(self.shape == other.shape)


def _new_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shapes.as_tensors if type.is_block() else _SCALAR_SHAPE


def _check_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    x, y = left.handle.data, right.handle.data
    if x.dtype.itemsize >= 8:  # as in Triton, which checks what fits into int64
        return
    exact = _ON_INTEGERS[operation.__name__](x, y, dtype=np.int64)
    limits = np.iinfo(x.dtype)
    inside = exact.size == 0 or limits.min <= exact.min() <= exact.max() <= limits.max
    assert inside, f"{x.dtype} overflow in {operation.__name__}"


def _with_element_ty(self: Any, scalar_ty: tl.dtype) -> tl.block_type:
    return self if scalar_ty is self.element_ty else tl.block_type(scalar_ty, self.shape)


def _same_dtype(self: Any, other: Any) -> bool:
    return self is other or _dtypes_are_equal(self, other)


def _two_tensors(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple:
    are_alike = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype
    divides = len(options) == 4 or bool(named)  # then there are other rules, as there are for pointers
    if are_alike and not divides and not lhs.dtype.is_ptr():
        return self.broadcast_impl_value(lhs, rhs)
    return _wants_tensors(self, lhs, rhs, *options, **named)


def _same_shape(self: Any, lhs: Any, rhs: Any) -> tuple:
    return (lhs, rhs) if lhs.type.is_block() and lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def _scan_by_rows(self: Any, inputs: tuple) -> list[tl.tensor]:
    """Combines whole rows, those at one place of the scanned axis, in the same order."""
    rows = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in inputs), strict=True)
    rows = [tuple(self.to_tensor(part, x.dtype) for part, x in zip(row, inputs, strict=True)) for row in rows]

    def combine(total: tuple, row: tuple) -> tuple:
        combined = self.combine_fn.fn(*total, *row)
        return combined if isinstance(combined, tuple) else (combined,)

    totals = zip(*itertools.accumulate(rows, combine), strict=True)
    results = (np.stack([each.handle.data for each in total], self.axis) for total in totals)
    shaped = (y.reshape(x.handle.data.shape) for x, y in zip(inputs, results, strict=True))
    return [self.to_tensor(y, x.dtype) for x, y in zip(inputs, shaped, strict=True)]


def _unwrap_constants(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    return _unwrap(value) if isinstance(value, (list, tuple, tl.tuple)) else value


def _with_semantic(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic
    function = getattr(member, "__wrapped__", member)  # without the wrapper, which asks whether `_semantic` is given

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


interpreter._patch_attr = _with_semantic
TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = _two_tensors, _same_shape
tl.dtype.__eq__, tl.core._unwrap_if_constexpr = _same_dtype, _unwrap_constants
tl.block_type.with_element_ty = _with_element_ty
interpreter._patch_lang = _replace_language_once
interpreter._get_np_dtype = _remembered_numpy_dtype
interpreter.ScanOps.generic_scan = _scan_by_rows
type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = _check_overflow
tl.block_type.__init__, tl.block_type.__eq__, tl.tensor.__init__ = _new_block_type, _same_block_type, _new_tensor
tl.block_type.name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
tl.block_type.name.__set_name__(tl.block_type, "name")
