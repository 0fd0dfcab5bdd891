"""The kernels that softmaxes, attention and steps take, and their launch parameters: without Triton or a GPU."""

import dataclasses

import pytest
import torch

from gla_core.dispatch.backend import OpCall, contiguous_layout
from gla_core.dispatch.calibration import KNOWN_DEVICES
from gla_triton_kernels.gla.step import plan as step
from gla_triton_kernels.online_softmax import plan as softmax
from gla_triton_kernels.online_softmax.rows import rows_of, rows_of_call
from gla_triton_kernels.softmax_attention import plan as attention
from gla_triton_runtime.architecture import Architecture, Gpu

H200 = Gpu(Architecture.SM90, 132)


# ---- online_softmax


def softmax_call(R, N):
    dims = {"rows": R, "columns": N}
    return OpCall(op="online_softmax", device=torch.device("cuda"), dtype=torch.bfloat16, dims=dims)


@pytest.mark.parametrize(
    ("columns", "kernel"),
    [
        (16384, softmax.Kernel.ON_CHIP),
        (16400, softmax.Kernel.TWO_SWEEPS),
        (8192, softmax.Kernel.ON_CHIP),
        (8191, softmax.Kernel.ON_CHIP),
        (8193, softmax.Kernel.TWO_SWEEPS_UNALIGNED),
        (50257, softmax.Kernel.TWO_SWEEPS_UNALIGNED),
    ],
)
def test_rows_that_fit_stay_on_chip(columns, kernel):
    assert softmax.plan_one_pass(rows_of_call(softmax_call(8192, columns))).kernel is kernel


def test_unaligned_rows_with_gaps_between_them_are_swept_column_by_column():
    x = torch.empty(9, 20005)[:, 1:-2]
    planned = rows_of(x, torch.empty(9, 20002), 1)
    assert (planned.vector, planned.packed) == (1, False)
    assert softmax.plan_one_pass(planned).kernel is softmax.Kernel.TWO_SWEEPS


@pytest.mark.parametrize(("R", "N"), [(1, 16), (8192, 1000), (3, 50257), (4, 2**24), (1, 1), (1, 2**20 + 1)])
def test_the_cost_model_prices_the_rows_that_are_launched(R, N):
    priced = rows_of_call(softmax_call(R, N))
    launched = rows_of(*[torch.empty(R, N, dtype=torch.bfloat16, device="meta")] * 2, 1)
    assert softmax.plan_one_pass(priced) == softmax.plan_one_pass(launched)
    assert softmax.plan_splits(priced, H200) == softmax.plan_splits(launched, H200)


@pytest.mark.parametrize(("R", "N"), [(1, 2**24), (4, 2**24 + 1), (8192, 50257), (3, 5)])
def test_splits_hold_all_columns(R, N):
    for sweep in softmax.plan_splits(rows_of_call(softmax_call(R, N)), H200):
        assert (sweep.programs - 1) * sweep.tiles * sweep.BN < N <= sweep.programs * sweep.tiles * sweep.BN


def test_splits_of_few_rows_fill_the_device():
    assert 4 * softmax.plan_splits(rows_of_call(softmax_call(4, 2**24)), H200).sums.programs >= 8 * 132


# ---- softmax_attention


def attention_call(unaligned="", **changes):
    """Returns a call. The tensors among q, k and v that `unaligned` names are at odd addresses."""
    scalars = {"causal": changes.pop("causal", True)}
    dtype = changes.pop("dtype", torch.bfloat16)
    dims = {"B": 1, "Tq": 1024, "Tk": 1024, "H": 8, "Hq": 8, "K": 128, "V": 128} | changes
    B, Tq, Tk, H, Hq, K, V = dims.values()
    shapes = {"q": (B, Tq, Hq, K), "k": (B, Tk, H, K), "v": (B, Tk, H, V)}
    return OpCall(
        op="softmax_attention",
        device=torch.device("cuda"),
        dtype=dtype,
        dims=dims,
        scalars=scalars,
        layouts={
            name: contiguous_layout(shape, dtype)._replace(aligned=name not in unaligned)
            for name, shape in shapes.items()
        },
    )


def test_specialised_warps_where_an_sm90_computes_many_queries_of_16_bits():
    one_pass, call, sm90 = attention.plan_one_pass, attention_call(), attention.SM90
    assert one_pass(call, H200).kernel is sm90
    assert one_pass(attention_call(Tq=65), H200).kernel is sm90
    for other in ({"Tq": 64}, {"K": 64, "V": 64}, {"K": 512}, {"V": 100}, {"dtype": torch.float32}):
        assert one_pass(attention_call(**other), H200).kernel is attention.GENERAL, other
    for architecture in set(Architecture) - {Architecture.SM90}:
        assert one_pass(call, Gpu(architecture, 132)).kernel is attention.GENERAL


def test_tma_takes_what_it_can_address():
    planned = attention.plan_one_pass(attention_call(unaligned="q"), H200)  # q is then read through pointers
    assert (planned.kernel, planned.tma) == (attention.GENERAL, True)
    assert not attention.plan_one_pass(attention_call(unaligned="v"), H200).tma
    assert not attention.plan_one_pass(attention_call(), Gpu(Architecture.SM80, 108)).tma


def test_tensors_whose_layouts_are_not_known_are_taken_for_addressable():
    for plan in (attention.plan_one_pass, attention.plan_splits):
        assert plan(dataclasses.replace(attention_call(), layouts={}), H200) == plan(attention_call(), H200)


def test_an_older_gpu_has_less_shared_memory_for_wide_heads():
    wide = attention_call(K=256, V=256, Tq=64)
    newer, older = (attention.plan_one_pass(wide, Gpu(a, 108)) for a in (Architecture.SM90, Architecture.SM80))
    assert older.BT == newer.BT // 2


def test_float32_keeps_its_precision_unless_tf32_is_allowed():
    exact = attention_call(dtype=torch.float32)
    assert attention.plan_one_pass(exact, H200).exact
    assert not attention.plan_one_pass(dataclasses.replace(exact, float32_matmul_precision="high"), H200).exact


@pytest.mark.parametrize("Tk", [1, 300, 131_072])
@pytest.mark.parametrize("Tq", [1, 128])
def test_splits_are_whole_blocks_and_few_keys_are_not_split(Tq, Tk):
    planned = attention.plan_splits(attention_call(Tq=Tq, Tk=Tk), H200)
    if Tk == 131_072:
        assert planned.split % planned.BT == 0
        assert planned.splits(Tk) * 8 >= 132
    else:
        assert (planned.split is None) == (Tk <= attention.FEWEST_BLOCKS * planned.BT)


def test_keys_that_are_not_split_may_take_specialised_warps():
    call = attention_call(B=8, Tq=4096, Tk=4096)
    planned = attention.plan_splits(call, H200)
    assert planned == attention.plan_one_pass(call, H200)
    assert (planned.kernel, planned.split) == (attention.SM90, None)
    unaligned = attention_call("q", B=8, Tq=4096, Tk=4096)
    assert attention.plan_splits(unaligned, H200).kernel is attention.GENERAL
    split = attention.plan_splits(attention_call(B=1, Tq=4096, Tk=4096), H200)
    assert (split.kernel, split.splits(4096)) == (attention.GENERAL, 4)
    one_query = attention.plan_splits(attention_call(B=64, Tq=1), H200)
    assert (one_query.kernel, one_query.split, one_query.stages) == (attention.GENERAL, None, 3)


def test_causal_as_the_call_says_else_by_the_number_of_queries():
    silent = dataclasses.replace(attention_call(), scalars={})
    assert attention.is_causal(silent)
    assert not attention.is_causal(attention_call(causal=False))
    assert not attention.is_causal(dataclasses.replace(attention_call(Tq=1), scalars={}))


# ---- recurrent_gla_step


def step_plan(B, gpu=H200, dtype=torch.float32, K=128, V=128, **facts):
    dims = {"B": B, "H": 16, "Hq": 16, "Hv": 16, "K": K, "V": V, "P": B}
    device, q = torch.device("cuda"), torch.bfloat16
    call = OpCall(op="recurrent_gla_step", device=device, dtype=q, dims=dims, state_dtype=dtype, **facts)
    return step.plan(call, gpu)


def test_many_states_take_wide_blocks_and_few_take_narrow_ones():
    assert step_plan(1) == step.Plan(128, 16, 1, True)
    assert step_plan(64) == step.Plan(128, 64, 4, True)
    assert step_plan(64, dtype=torch.bfloat16).BV == 128
    assert step_plan(1, V=7).BV == 8
    assert step_plan(64, batch_invariant=64) == step_plan(1, batch_invariant=64)


def test_steps_overlap_from_sm90_on():
    assert not step_plan(1, Gpu(Architecture.SM80, 108)).overlaps


# ---- gradients


def gradient_call(lse=False, **changes):
    """Returns a backward for a GPU that is not here, so that its libraries count as new enough."""
    call = dataclasses.replace(
        attention_call(**changes), op="softmax_attention_bwd", assumed=KNOWN_DEVICES["NVIDIA H200"]
    )
    return dataclasses.replace(call, given=frozenset({"dlse"} if lse else ()))


def test_libraries_compute_gradients_where_they_can():
    def name(call, gpu=H200):
        return attention.gradient_kernel(call, gpu).name

    a100, rtx, amd = (Gpu(a, 108) for a in (Architecture.SM80, Architecture.SM86, Architecture.AMD))
    call = gradient_call()
    assert [name(call, gpu) for gpu in (H200, a100, rtx, amd)] == ["cudnn", "flash", "flash", "backward"]
    assert name(gradient_call(lse=True)) == name(gradient_call(Hq=32)) == "cudnn"
    assert name(gradient_call(K=256, V=256)) == "flash"
    assert name(gradient_call(K=256, V=256), rtx) == "backward"
    for other in ({"dtype": torch.float32}, {"dtype": torch.float16, "lse": True}, {"Tq": 512}, {"K": 36}, {"V": 512}):
        assert name(gradient_call(**other)) == "backward", other
    assert name(gradient_call(Tq=512, causal=False)) == "cudnn"
    assert name(gradient_call(unaligned="k")) == "backward"
    assert name(dataclasses.replace(call, deterministic=True)) == "backward"
    here = dataclasses.replace(call, assumed=None)  # PyTorch for a CPU has neither library
    assert name(here) == "backward" or torch.cuda.is_available()


def test_the_kernel_of_a_backward_is_explained():
    lines = attention.explain_gradients(gradient_call(K=256, V=256))
    assert lines[0] == "kernel flash"
    assert lines[1].startswith("not cudnn: computes heads of up to 128")
    assert attention.explain_gradients(gradient_call()) == ["kernel cudnn"]


@pytest.mark.parametrize("width", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_gradients_fit_into_shared_memory(width, dtype):
    for architecture in (Architecture.SM90, Architecture.SM86):
        plan = attention.plan_gradients(gradient_call(K=width, V=width, dtype=dtype), Gpu(architecture, 108))
        tiles = 2 * (plan.held + plan.stages * plan.passed) * plan.BK * dtype.itemsize
        assert tiles <= architecture.facts.shared_memory or (plan.held, plan.stages) == (attention.LEAST_TILE, 1)


@pytest.mark.parametrize("columns", [128, 4096, 16384, 16400, 50257, 65536])
def test_a_thread_holds_half_as_many_columns_for_a_gradient(columns):
    rows = rows_of_call(softmax_call(8192, columns))
    one, gradient = softmax.plan_one_pass(rows), softmax.plan_gradient_one_pass(rows)
    assert gradient.kernel is one.kernel
    assert gradient.BR * gradient.BN * one.warps <= one.BR * one.BN * gradient.warps
