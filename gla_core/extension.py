"""Names for packages beside gla_core that extend it by more than a backend: parts of layers, settings, and workloads.

The plugins gla_transformers, gla_vllm and gla_fla are made of them. Within a minor version they keep their meaning. A
backend needs none of them: its contract is `gla_core.dispatch.backend`.
"""

from gla_core.bench.first_call_process import first_calls
from gla_core.compat.mamba_ssm.kernels import Kernels, provide_kernels
from gla_core.dispatch.environment import environment
from gla_core.dispatch.errors import nearest
from gla_core.dispatch.request import current_request
from gla_core.nn.activations import activation
from gla_core.nn.gated_linear_attention import Projections
from gla_core.nn.hgrn2 import log_gate
from gla_core.nn.merged import Merging, added, matrix_of, products, split
from gla_core.nn.plain import is_plain
from gla_core.nn.recompute import not_kept, recomputed
from gla_core.nn.recurrence import head_width
from gla_core.nn.rms_norm import RMSNormGated
from gla_core.nn.short_convolution import ShortConvolution
from gla_core.ops.autocast import off as autocast_off
from gla_core.ops.calls import bypasses_torch, needs_gradient, transformed
from gla_core.ops.checks import MOST_STEPS
from gla_core.workloads.named import WORKLOADS, Workload

__all__ = [
    "MOST_STEPS",
    "WORKLOADS",
    "Kernels",
    "Merging",
    "Projections",
    "RMSNormGated",
    "ShortConvolution",
    "Workload",
    "activation",
    "added",
    "autocast_off",
    "bypasses_torch",
    "current_request",
    "environment",
    "first_calls",
    "head_width",
    "is_plain",
    "log_gate",
    "matrix_of",
    "nearest",
    "needs_gradient",
    "not_kept",
    "products",
    "provide_kernels",
    "recomputed",
    "split",
    "transformed",
]
