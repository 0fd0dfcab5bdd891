"""Calls that are prepared once: kernels are compiled before anything is written, and later calls plan nothing."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch import Tensor

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.dispatch.backend import CHUNK, Backend, Capabilities, KnownDevice, LaunchError, Prepared
from gla_core.dispatch.registry import get
from gla_core.ops import ABSTRACT_OPS
from gla_core.workloads.inputs import gla_inputs
from tests.backends import fake_driver
from tests.backends.fake_kernels import Kernel
from tests.backends.prepared_calls import described, preparing

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from gla_triton_kernels import gla as family
from gla_triton_kernels.gla import forward
from gla_triton_kernels.gla.step import step
from gla_triton_kernels.online_softmax import splits
from gla_triton_kernels.softmax_attention import softmax_attention
from gla_triton_kernels.softmax_attention.plan import plan_splits
from gla_triton_runtime import launch, prepared, replay
from gla_triton_runtime.prepared import Launches, rehearsed


@pytest.fixture
def absent_gpu(monkeypatch):
    """Returns a function that turns a call into a call on an H200, which need not exist here."""
    monkeypatch.setattr(launch, "_prepare_compiler", lambda: None)
    monkeypatch.setattr(prepared, "on_device", lambda _: contextlib.nullcontext())
    device = KnownDevice("NVIDIA H200", 132, (9, 0))
    return lambda call: dataclasses.replace(call, device=torch.device("cuda", 0), assumed=device)


# ---- kernels are compiled when a call is prepared

BY_OTHERS = {"chunk_ssd_bwd", "chunk_delta_summary", "chunk_delta_gradient_summary"}
"""Ops that are computed by others, whose kernels the calls of those compile."""


def fake(monkeypatch, module, name, told, error=None):
    """Replaces a kernel of a module by one that notes its calls."""
    kernel = Kernel(name.strip("_"), told, error, getattr(module, name).arg_names)
    monkeypatch.setattr(module, name, kernel)


def test_a_second_kernel_that_does_not_fit_is_found_before_the_first_is_launched(absent_gpu, monkeypatch):
    told, error = [], OutOfResources(300_000, 232_448, "shared memory")
    fake(monkeypatch, splits, "_sum_splits", told)
    fake(monkeypatch, splits, "_write", told, error)
    call = absent_gpu(described("online_softmax", torch.empty(4, 2**20, device="meta"), 1))
    refusal = r"^write cannot be launched on this device: OutOfResources: .*300000"
    with pytest.raises(LaunchError, match=refusal) as raised:
        preparing("parallel_scan", "online_softmax")(call)
    assert raised.value.__cause__ is error
    beside = [("warmup", "sum_splits"), ("warmup", "write")]
    loaded = [("warmup", "sum_splits"), ("load", "sum_splits"), ("warmup", "write")]
    assert [(what, name) for what, name, *_ in told] == beside + loaded


@pytest.mark.parametrize("op", sorted(get("triton_fused").ops.keys() - BY_OTHERS))
@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
def test_all_kernels_of_a_call_are_compiled_when_it_is_prepared(op, backend, absent_gpu, monkeypatch):
    """For this, the launches of the call are described with tensors without values."""
    made = []
    monkeypatch.setattr(prepared, "compile_launches", made.extend)
    monkeypatch.setattr(prepared, "start", lambda launches: pytest.fail("launched"))
    preparing(backend, op)(absent_gpu(described(op, *arguments_of(op, "meta"))))
    assert made
    assert all(isinstance(each, launch.Launch) for each in made)
    tensors = [x for each in made for x in each.arguments.values() if isinstance(x, Tensor)]
    assert {x.device.type for x in tensors} <= {"meta"}


@pytest.mark.parametrize("op", ["chunk_delta_summary", "chunk_delta_gradient_summary"])
@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
@pytest.mark.parametrize("room", [0, 1])
def test_hopper_computes_summaries_of_delta_rules_by_kernels_of_their_own(op, backend, room, absent_gpu, monkeypatch):
    """Under batch invariance also of tensors that TMA cannot address, with room behind rows; then none is cut.

    Copies of these are among the tensors of the call, so a recorded call makes them as well.
    """
    made, passed, replay = [], [], Launches.replay
    monkeypatch.setattr(prepared, "compile_launches", made.extend)
    monkeypatch.setattr(Launches, "replay", lambda self, x, *floats: (passed.extend(x), replay(self, x, *floats))[1])
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    k, v, beta = (new(1, 8192, 2, 64 + room)[..., :64], new(1, 8192, 2, 96 + room)[..., :96], new(1, 8192, 2))
    tokens = (k, v, None, beta) if op == "chunk_delta_summary" else (k, k, v, None, beta)
    call = absent_gpu(described(op, *tokens, None, None))
    preparing(backend, op)(dataclasses.replace(call, batch_invariant=CHUNK if room else None))
    assert passed
    assert not room or all(x is None or x.is_contiguous() for x in passed)
    kernels = [each.kernel.fn.__name__ for each in made]
    others = op == "chunk_delta_gradient_summary"  # its pass over sequences has the name of the scan
    scans = kernels.count("_scan_kernel") - others
    assert scans == (2 if backend == "parallel_scan" and not room else 0)
    assert not any("gradients" in name for name in kernels)


def arguments_of(op, device, seed=0):
    """Returns the arguments of a small call, in the order of the contract."""
    torch.manual_seed(seed)
    x = gla_inputs(B=1, T=20, H=2, K=32, V=64, initial_state=True, seed=seed)
    do = torch.randn(1, 20, 2, 64)
    token, few = ([y[:, at] for y in (x.q, x.k, x.v, x.g)] for at in (0, slice(3)))
    pool, offsets, one = x.initial_state.repeat(3, 1, 1, 1), torch.tensor([0, 20]), torch.tensor([1])
    scan = (x.q, x.k, x.v, x.g[..., 0], -torch.rand(2), torch.ones(2), torch.rand(2), True, 0.0, 1.0)
    beta = torch.rand(1, 20, 2)
    rings = [y[:, :6].repeat(3, 1, 1, 1) for y in (x.k, x.v, x.g)]
    family, betas = op.replace("_delta_", "_gla_"), {"step": beta[:, 0], "steps": beta[:, :3], "replay": beta[:, :3]}
    values = {
        "chunk_gla_fwd": (x.q, x.k, x.v, x.g, 0.3, x.initial_state, True, None, None, None),
        "chunk_gla_bwd": (x.q, x.k, x.v, x.g, 0.3, x.initial_state, None, None, None, do, None, None),
        "chunk_gla_pool": (x.q, x.k, x.v, x.g, pool, offsets, one, None, 0.3, None, one, one + 1, -1, None, None),
        "chunk_gla_summary": (x.k, x.v, x.g, None, False, None),
        "chunk_ssd_fwd": (*scan, x.initial_state, True, None, None),
        "recurrent_gla_step": (*token, x.initial_state, 0.3, None, None, None, False),
        "recurrent_gla_layer_step": (*token, x.initial_state, token[2], x.v[0, 0, 0], 0.3, 0.1, "silu", None, None),
        "recurrent_ssd_step": (
            *token[:3],
            x.initial_state,
            token[2][..., 0],
            *x.v[0, :3, :, 0],
            token[2],
            0.3,
            True,
            True,
            None,
        ),
        "recurrent_gla_steps": (*few, pool, one[:, None] + torch.arange(3), 0.3, *(None,) * 4, -1, None, None),
        "recurrent_gla_replay": (*few, pool, *rings, one, one + 4, one, 0.3, None, None, -1, None, None),
        "online_softmax": (torch.randn(3, 700), 1),
        "online_softmax_bwd": (torch.randn(3, 700), 1, torch.randn(3, 700)),
        "softmax_attention": (x.q, x.k, x.v, 0.3, True),
        "softmax_attention_bwd": (x.q, x.k, x.v, do, do[..., 0], 0.3, True, do, do[..., 0]),
    }[family]
    if op == "recurrent_delta_step":
        values = (*values[:-2], values[-1])  # a delta rule has no bonus
    if family != op:
        values = (*values[:4], betas.get(op.rsplit("_", 1)[1], beta), *values[4:])
    if op.startswith("recurrent_delta"):
        values = (*values[:-1], 1e-6, 2.0, "bounded", -5.0, torch.rand(2), torch.rand(2, 32), values[-1])
    return [y.to(device) if isinstance(y, Tensor) else y for y in values]


# ---- the arguments of a rehearsal


def strided_step(inplace):
    """Describes a step whose tensors have various strides. One tensor, the gate, is None."""
    q, k, v = torch.empty(3, 4, 16)[:, ::2], torch.empty(2, 3, 16).transpose(0, 1), torch.empty(3, 2, 9)[..., 1:]
    state, indices = torch.empty(5, 2, 8, 16, dtype=torch.bfloat16).mT, torch.empty(3, dtype=torch.int32)
    arguments = (q, k, v, None, state, 0.3, indices, None, None, inplace)
    return described("recurrent_gla_step", *arguments), arguments


@pytest.mark.parametrize("inplace", [False, True])
def test_a_rehearsal_is_given_what_a_call_is_given_but_values(inplace):
    calls = []

    def run(q, k, v, g, state, scale, state_indices, gate_normalizer, bonus, inplace):
        calls.append((q, k, v, g, state, scale, state_indices, gate_normalizer, bonus, inplace))

    call, arguments = strided_step(inplace)
    assert rehearsed(run, dataclasses.replace(call, device=torch.device("cuda", 0))) is run
    (received,) = calls
    for x, expected in zip(received, arguments, strict=True):
        if isinstance(expected, Tensor):
            assert x.is_meta
            assert (x.shape, x.stride(), x.dtype) == (expected.shape, expected.stride(), expected.dtype)
        else:
            assert x is expected or (expected, x) == (0.3, 1.0)
    assert received[5] == 1.0
    assert received[3] is None
    assert received[9] is inplace


def test_scalars_of_a_rehearsal_are_those_of_the_call():
    calls = []

    def run(q, initial_state, output_final_state, cu_seqlens, checkpoint_every, scale):
        calls.append((q.shape, initial_state, output_final_state, cu_seqlens.shape, checkpoint_every, scale))

    x = gla_inputs(lengths=(3, 5), H=2, K=16, V=16)
    arguments = (x.q, x.k, x.v, x.g, 0.3, None, True, x.cu_seqlens, 128)
    call = described("chunk_gla_fwd", *arguments)
    rehearsed(run, dataclasses.replace(call, device=torch.device("cuda", 0)))
    assert calls == [((1, 8, 2, 16), None, True, (3,), 128, 1.0)]


def test_nothing_is_rehearsed_on_a_cpu():
    def run(**_):
        pytest.fail("called")

    assert rehearsed(run, strided_step(False)[0]) is run


def test_nothing_is_rehearsed_for_the_interpreter(monkeypatch):
    def run(**_):
        pytest.fail("called")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rehearsed(run, dataclasses.replace(strided_step(False)[0], device=torch.device("cuda", 0)))


# ---- launches, on a fake device that only notes them


@pytest.fixture
def gpu(monkeypatch):
    return fake_driver.install(monkeypatch)


class Described:
    """Describes the launches of calls of two kernels, and notes the floats of these calls."""

    def __init__(self, gpu):
        self.gpu, self.floats = gpu, []
        self.launches = Launches(torch.device("cpu"))

    def describe(self, tensors, scale):
        self.floats.append(scale)
        x, y = tensors
        scratch = torch.empty(3, 5, dtype=torch.float64, device=x.device)
        return fake_driver.two_launches(self.gpu, x, y, scratch, scale)

    def make(self, x, y, scale):
        """Makes the launches of a call as a backend does."""
        if unrecorded := self.launches.replay((x, y), scale):
            unrecorded.start(self.describe((x, y), scale))

    def told(self, x, y, scale):
        """Starts the launches of a call, and returns the addresses and the float that the device received."""
        self.gpu.launched.clear()
        self.make(x, y, scale)
        (*_, first, _, _, _), (*_, second, passed, _) = self.gpu.launched
        return first, second, passed


def test_launches_are_recorded_at_the_first_call_and_replayed_from_the_second_on(gpu):
    described = Described(gpu)
    for scale in (0.5, 0.25, 0.5):
        x, y = fake_driver.tensor(), fake_driver.tensor()
        assert described.told(x, y, scale) == (x.data_ptr(), y.data_ptr(), scale)
    assert described.floats == [0.5]


def test_a_call_that_writes_the_slots_it_reads_replays_no_launches_of_calls_that_write_others(absent_gpu, monkeypatch):
    started = []
    monkeypatch.setattr(prepared.UnrecordedCall, "start", lambda call, _: started.append(call[:2]))
    arguments = arguments_of("chunk_gla_pool", "cpu")
    read = arguments[6]
    arguments[7] = read + 1
    run = preparing("parallel_scan", "chunk_gla_pool")(absent_gpu(described("chunk_gla_pool", *arguments)))
    started.clear()
    for write in (read + 1, read, read + 1):
        run(*arguments[:7], write, *arguments[8:])
    (others, their_tensors), (in_place, in_place_tensors), (again, _) = started
    assert again is others is not in_place
    assert [x is None for x in their_tensors] != [x is None for x in in_place_tensors]


@pytest.mark.parametrize(
    "why", ["profiled", "unaligned", "one tensor twice", "scratch that is not contiguous", "a view of a result"]
)
def test_launches_that_cannot_be_recorded_are_described_by_every_call(gpu, monkeypatch, why):
    described, x, y = Described(gpu), fake_driver.tensor(), fake_driver.tensor()
    if why == "profiled":
        monkeypatch.setattr(replay, "_profiled", lambda: True)
    elif why == "unaligned":
        x = torch.zeros(800)[1:769].view(2, 16, 3, 8)
    elif why == "one tensor twice":
        y = x
    else:
        made = fake_driver.two_launches
        scratch = (lambda y, z: z.mT) if "scratch" in why else (lambda y, z: y.view(-1))
        monkeypatch.setattr(fake_driver, "two_launches", lambda gpu, x, y, z, s: made(gpu, x, y, scratch(y, z), s))
    for _ in range(3):
        assert described.told(x, y, 0.5) == (x.data_ptr(), y.data_ptr(), 0.5)
    assert described.floats == [0.5] * 3


@pytest.mark.parametrize("floats", [(), (0.5, 0.5)])
def test_launches_take_the_floats_of_the_call(gpu, floats):
    described, x, y = Described(gpu), fake_driver.tensor(), fake_driver.tensor()
    with pytest.raises(ValueError, match="fake takes the floats"):
        described.launches.replay((x, y), *floats).start(described.describe((x, y), 0.5))
    assert not gpu.launched


def test_launches_that_are_not_replayed_are_recorded_anew(gpu):
    """The third call is on another device, and is recorded anew. The fourth call replays that record."""
    described, x, y = Described(gpu), fake_driver.tensor(), fake_driver.tensor()
    for gpu.index in (0, 0, 1, 1):
        assert described.told(x, y, 0.5) == (x.data_ptr(), y.data_ptr(), 0.5)
    assert described.floats == [0.5] * 2


def test_tensors_without_values_are_compiled_for_and_nothing_is_launched(gpu, monkeypatch):
    compiled = []
    monkeypatch.setattr(prepared, "compile_launches", compiled.append)
    described, x, y = Described(gpu), fake_driver.tensor(), fake_driver.tensor()
    for _ in range(2):  # nor is anything recorded
        described.make(x.to("meta"), y.to("meta"), 1.0)
    assert [len(launches) for launches in compiled] == [2, 2]
    assert gpu.launched == []
    assert described.told(x, y, 0.5) == (x.data_ptr(), y.data_ptr(), 0.5)
    assert (len(compiled), described.floats) == (2, [1.0, 1.0, 0.5])


# ---- through gla_core


@pytest.fixture
def register():
    """Returns a function that registers a backend with one op under the name "counted"."""
    made = []

    def registered(op: str, prepared: Prepared) -> None:
        made.append(gla.register(Backend("counted", "1.0", {op: prepared}, Capabilities())))

    yield registered
    for each in made:
        each.unregister()


def unaligned(x):
    """Copies a tensor to an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def check(op, actual, arguments):
    """Checks the results of an op against the oracle."""
    results = [actual] if isinstance(actual, Tensor) else actual
    if op == "recurrent_gla_step":
        q, k, v, g, state, scale, *_ = arguments
        references = oracle.recurrent_gla_step(*(x.double() for x in (q, k, v, g.exp(), state)), scale)
    elif op == "softmax_attention":
        references = oracle.softmax_attention(*arguments)
    else:
        references = [oracle.softmax(*arguments)]
    for x, reference in zip(results, references, strict=True):
        assert relative_error(x, reference) <= FORWARD[torch.float32]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("op", "moved"), [("online_softmax", ["x"]), ("recurrent_gla_step", ["q", "state"]), ("softmax_attention", ["k"])]
)
def test_calls_with_unaligned_tensors_are_prepared_apart(op, moved, backend, device, register):
    prepare, contract, alignments = preparing(backend, op), ABSTRACT_OPS[op].contract, []

    def noted(call):
        alignments.append([name for name, layout in call.layouts.items() if not layout.aligned])
        return prepare(call)

    register(op, Prepared(noted, contract))
    for seed in range(3):
        for odd in (None, *moved):
            arguments = arguments_of(op, device, seed)
            arguments = [unaligned(x) if name == odd else x for name, x in zip(contract, arguments, strict=True)]
            named = dict(zip(contract, arguments, strict=True))
            check(op, getattr(gla, op)(**named, backend="counted"), arguments)
    assert alignments == [[], *([name] for name in moved)]


@pytest.fixture(params=["recurrent_gla_step", "softmax_attention", "chunk_gla_fwd"])
def planned(request, register, monkeypatch):
    """Registers an op, and returns its name and a list of the calls that have been planned."""
    calls = []

    def noted(plan):
        return lambda call, *others: (calls.append(call), plan(call, *others))[1]

    for module in (step, forward):
        monkeypatch.setattr(module, "plan", noted(module.plan))
    ops = {**family.ops(cut=True), "softmax_attention": softmax_attention(noted(plan_splits))}
    register(request.param, ops[request.param])
    return request.param, calls


@pytest.mark.kernels
def test_later_calls_plan_nothing(planned, device):
    op, calls = planned
    contract, run = ABSTRACT_OPS[op].contract, getattr(gla, op.removesuffix("_fwd"))

    def call(seed, rows=1):
        each = arguments_of(op, device, seed)
        arguments = [x.repeat_interleave(rows, 0) if isinstance(x, Tensor) else x for x in each]
        run(**{**dict(zip(contract, arguments, strict=True)), "scale": 0.1 * seed - 0.1}, backend="counted")

    for seed in range(4):
        call(seed)
    assert len(calls) == 1
    for seed in range(2):
        call(seed, rows=2)  # another signature
    assert [planned.dims["B"] for planned in calls] == [1, 2]
