"""The device and the dtypes of the tests of kernels, notes of calls, and kernels compiled for any GPU."""

import os
from types import SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
"""Triton's names for the types of tensors."""
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1")


def noted(calls, module, *names):
    """Returns functions of a module by their names; each call of one adds its name to `calls`."""

    def function(name):
        return lambda *args, **options: calls.append(name) or getattr(module, name)(*args, **options)

    return SimpleNamespace(**{name: function(name) for name in names})


def compiled(launch, target):
    """Returns the kernel of a launch as Triton compiles it for a target, such as ("cuda", 90, 32)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments.values(), strict=True)):
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if signature[parameter.name] != "constexpr" and aligned and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=dict(launch.options))
