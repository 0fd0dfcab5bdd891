"""The backend gla_fla, with FLA replaced by the float64 recurrence behind FLA's signatures."""

import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import relative_error
from gla_core.dispatch import registry
from gla_core.dispatch.backend import LaunchError, OpCall
from gla_core.workloads.inputs import gla_inputs

SOURCE = Path(__file__).parents[2] / "plugins" / "gla_fla" / "src"
RCP_LN2 = 1.4426950216
DIMS = {"B": 2, "T": 64, "H": 2, "Hq": 2, "K": 64, "V": 64, "N": 2}
STEP_DIMS = {"B": 2, "H": 2, "Hq": 2, "K": 64, "V": 64, "P": 2}


@pytest.fixture
def module(on_path):
    """A function: `module(name)` imports gla_fla or a module of it."""
    on_path("gla_fla", SOURCE)
    return lambda name="": importlib.import_module(f"gla_fla.{name}".rstrip("."))


@pytest.fixture
def fake_fla(monkeypatch):
    """FLA's functions with FLA's parameters and checks, computed by the oracle; `calls` records the calls."""
    calls: list[str] = []
    ops, chunk = ModuleType("fla.ops.gla"), ModuleType("fla.ops.gla.chunk")
    for name, value in {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), ops.__name__: ops}.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, chunk.__name__, chunk)

    def unwritten(x, cu_seqlens):
        """Fills rows of no sequence with 7, like memory that was not written."""
        if cu_seqlens is not None:
            x[:, cu_seqlens[-1] :] = 7
        return x

    def chunk_gla(
        q,
        k,
        v,
        g,
        scale=None,
        initial_state=None,
        output_final_state=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        calls.append("chunk_gla")
        assert initial_state is None or initial_state.dtype == torch.float32
        assert q.shape == k.shape == g.shape
        assert not torch.is_grad_enabled()
        o, state = oracle.chunk_gla(q, k, v, g, scale, initial_state, cu_seqlens)
        return unwritten(o.to(v.dtype), cu_seqlens), state.float() if output_final_state else None

    def fused_recurrent_gla(
        q,
        k,
        v,
        gk=None,
        gv=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        reverse=False,
        state_v_first=False,
        cu_seqlens=None,
    ):
        calls.append("fused_recurrent_gla")
        assert q.shape[1] == 1
        o, state = oracle.chunk_gla(q, k, v, gk, scale, initial_state)
        return o.to(q.dtype), state.float() if output_final_state else None

    def bounds(T, cu_seqlens, C):
        """Returns the first and the last token of each chunk."""
        offsets = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
        spans = itertools.pairwise(offsets)
        return [(start, min(start + C, stop)) for begin, stop in spans for start in range(begin, stop, C)]

    def prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
        lengths = cu_seqlens.diff().tolist()
        return torch.tensor([(i, j) for i, n in enumerate(lengths) for j in range(-(-n // chunk_size))])

    def chunk_local_cumsum(g, chunk_size, reverse=False, scale=None, cu_seqlens=None):
        sums = torch.full_like(g, 7, dtype=torch.float32)
        for a, b in bounds(g.shape[1], cu_seqlens, chunk_size):
            sums[:, a:b] = g[:, a:b].float().cumsum(1) * scale
        return sums

    def chunk_gla_fwd_intra_gk(q, k, g, scale, cu_seqlens=None, chunk_size=64, chunk_indices=None):
        calls.append("chunk_gla_fwd_intra_gk")
        return scale * (q * k * g).sum(-1, keepdim=True).expand(*q.shape[:3], chunk_size)

    def chunk_gla_bwd(
        q,
        k,
        v,
        g,
        g_cumsum,
        scale,
        initial_state,
        h,
        A,
        do,
        dht,
        state_v_first=False,
        cu_seqlens=None,
        chunk_size=64,
        chunk_indices=None,
    ):
        calls.append("chunk_gla_bwd")
        tensors = (q, k, v, g, g_cumsum, initial_state, do, dht, cu_seqlens)
        assert all(x.is_contiguous() for x in tensors if x is not None)
        assert h is None
        assert torch.equal(A, chunk_gla_fwd_intra_gk(q, k, g_cumsum, scale, cu_seqlens, chunk_size))
        if cu_seqlens is not None:
            assert torch.equal(chunk_indices, prepare_chunk_indices(cu_seqlens, chunk_size))
        gate = torch.zeros_like(g_cumsum)
        for a, b in bounds(q.shape[1], cu_seqlens, chunk_size):
            part = g_cumsum[:, a:b]
            gate[:, a:b] = torch.diff(part, dim=1, prepend=torch.zeros_like(part[:, :1])) / RCP_LN2
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, gate, initial_state) if x is not None]
        with torch.enable_grad():
            state = leaves[4] if initial_state is not None else None
            outputs = oracle.chunk_gla(*leaves[:4], scale, state, cu_seqlens)
            weights = (do.double(), torch.zeros_like(outputs[1]) if dht is None else dht.double())
            dq, dk, dv, dg, *dstate = torch.autograd.grad(outputs, leaves, weights)
        dq, dk, dv, dg = (unwritten(d, cu_seqlens) for d in (dq.float(), dk.float(), dv, dg.float()))
        return dq, dk, dv, dg, dstate[0] if dstate else None

    ops.chunk_gla, ops.fused_recurrent_gla, ops.calls = chunk_gla, fused_recurrent_gla, calls
    chunk.prepare_chunk_indices, chunk.chunk_local_cumsum = prepare_chunk_indices, chunk_local_cumsum
    chunk.chunk_gla_fwd_intra_gk, chunk.chunk_gla_bwd, chunk.RCP_LN2 = chunk_gla_fwd_intra_gk, chunk_gla_bwd, RCP_LN2
    return ops


def expected_gradients(x, scale, do, dstate):
    leaves = [t.detach().double().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state) if t is not None]
    q, k, v, *rest = leaves
    g = rest.pop(0) if x.g is not None else None
    state = rest.pop() if rest else None
    outputs = oracle.chunk_gla(q, k, v, g, scale, state, x.cu_seqlens)
    weights = (do.double(), torch.zeros_like(outputs[1]) if dstate is None else dstate.double())
    gradients = list(torch.autograd.grad(outputs, leaves, weights))
    if x.g is None:
        gradients.insert(3, None)
    return gradients if x.initial_state is not None else [*gradients, None]


def test_it_is_found_by_its_entry_point(module):
    (info,) = [b for b in gla.backends() if b.name == "gla_fla"]
    assert (info.error, info.plugin, info.version) == (None, "gla_fla", "0.1.0")
    assert info.ops[:3] == ("chunk_gla_fwd", "chunk_gla_bwd", "recurrent_gla_step")
    steps = ("recurrent_gla_layer_step", "recurrent_ssd_step", "recurrent_gla_steps", "recurrent_gla_replay")
    assert info.ops[3:] == (
        "chunk_gla_pool",
        "chunk_ssd_fwd",
        "chunk_ssd_bwd",
        *steps,
    )  # by the core, from the first three


def test_discovery_imports_neither_fla_nor_triton(plugin_path):
    script = """
import sys, gla_core as gla
before = set(sys.modules)
assert "gla_fla" in [b.name for b in gla.backends() if b.error is None], gla.backends()
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert "gla_fla" in new and not new & {"fla", "triton", "transformers"}, new
"""
    path = os.pathsep.join(plugin_path("gla_fla", SOURCE))
    result = subprocess.run([sys.executable, "-Bc", script], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert result.returncode == 0


INSTALL_FLA = r"pip install 'flash-linear-attention==0\.6\.0'"


@pytest.mark.parametrize(("op", "missing"), [("chunk_gla_fwd", "fla.ops.gla"), ("chunk_gla_bwd", "fla.ops.gla.chunk")])
def test_without_fla_it_says_what_to_install(module, monkeypatch, op, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    x = gla_inputs(B=1, T=1)
    rest = {"chunk_gla_fwd": (False, None, None), "chunk_gla_bwd": (None, None, None, x.v, None)}[op]
    with pytest.raises(LaunchError, match=INSTALL_FLA):
        getattr(module("chunk_gla"), op)(x.q, x.k, x.v, x.g, 1.0, None, *rest)


def test_without_fla_a_step_says_what_to_install(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gla", None)
    x, state = torch.zeros(1, 2, 16), torch.zeros(1, 2, 16, 16)
    with pytest.raises(LaunchError, match=INSTALL_FLA):
        module("recurrent_gla_step").recurrent_gla_step(x, x, x, x, state, 1.0, None, False)


def test_a_cpu_is_refused(module):
    q = torch.zeros(1, 4, 1, 16)
    (candidate,) = gla.explain("chunk_gla_fwd", q, q, q, q, backend="gla_fla").candidates
    assert candidate.refusal == "needs a cuda device; q is on cpu"


def cuda_call(op="chunk_gla_fwd", dtype=torch.bfloat16, **facts):
    dims = STEP_DIMS if op == "recurrent_gla_step" else DIMS
    return OpCall(**{"op": op, "dims": dims, "device": torch.device("cuda"), "dtype": dtype, **facts})


REFUSED = {
    "grouped queries": (cuda_call(dims={**DIMS, "Hq": 4}), "has no grouped queries; q has 4 heads and k has 2"),
    "float64": (cuda_call(dtype=torch.float64), "computes bfloat16, float16 or float32; q is float64"),
    "float32 without TF32": (
        cuda_call(dtype=torch.float32),
        "multiplies float32 in TF32, and torch.get_float32_matmul_precision() is 'highest'; "
        "allow TF32 by torch.set_float32_matmul_precision('high')",
    ),
    "narrow values with gradients": (
        cuda_call("chunk_gla_bwd", dims={**DIMS, "V": 8}),
        "computes gradients for V from 9; V is 8",
    ),
    "packed sequences in a graph": (
        cuda_call(variable_length=True, capturing=True),
        "waits for the host with cu_seqlens, so it cannot be captured into a CUDA graph",
    ),
    "a pool": (
        cuda_call("recurrent_gla_step", state_dtype=torch.float32, indexed=True),
        "has no pool of states; leave out slots",
    ),
    "a bfloat16 state": (
        cuda_call("recurrent_gla_step", state_dtype=torch.bfloat16),
        "writes float32 states; state is bfloat16",
    ),
}
ACCEPTED = {
    "bfloat16": cuda_call(),
    "packed": cuda_call("chunk_gla_bwd", dtype=torch.float16, variable_length=True),
    "in a graph": cuda_call(capturing=True),
    "V of 9": cuda_call("chunk_gla_bwd", dims={**DIMS, "V": 9}),
    "a step in float32": cuda_call("recurrent_gla_step", dtype=torch.float32, state_dtype=torch.float32),
}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_refuses(module, hopper, call, reason):
    assert registry.get("gla_fla").refusal(call) == reason


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_it_accepts(module, hopper, call):
    assert registry.get("gla_fla").refusal(call) is None


def test_float32_is_accepted_with_leave_to_use_tf32(module, hopper):
    call = dataclasses.replace(REFUSED["float32 without TF32"][0], float32_matmul_precision="high")
    assert registry.get("gla_fla").refusal(call) is None


CASES = {
    "plain": {"B": 2, "T": 70},
    "shorter than a chunk": {"B": 1, "T": 5, "initial_state": True},
    "ungated": {"B": 2, "T": 20, "gates": "none", "initial_state": True},
    "packed": {"lengths": (0, 65, 1, 0, 30), "initial_state": True},
    "padded": {"lengths": (20, 0, 66), "padding": 9},
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("wants_state", [False, True])
def test_forward(module, fake_fla, sizes, wants_state):
    x = gla_inputs(**sizes)
    arguments = (x.q, x.k, x.v, x.g, 0.3, x.initial_state, wants_state, x.cu_seqlens, None)
    o, state, _ = module("chunk_gla").chunk_gla_fwd(*arguments)
    o_ref, state_ref = oracle.chunk_gla(x.q, x.k, x.v, x.g, 0.3, x.initial_state, x.cu_seqlens)
    assert relative_error(o, o_ref) < 1e-6
    assert fake_fla.calls == ["chunk_gla"]
    if wants_state:
        assert relative_error(state, state_ref) < 1e-6
    else:
        assert state is None


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("with_dstate", [False, True])
def test_backward(module, fake_fla, sizes, with_dstate):
    x = gla_inputs(**sizes)
    do = torch.randn_like(x.v).transpose(1, 2).contiguous().transpose(1, 2)
    N = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    dstate = torch.randn(N, *x.k.shape[2:], x.v.shape[-1]) if with_dstate else None
    arguments = (x.q, x.k, x.v, x.g, 0.3, x.initial_state, x.cu_seqlens, None, None, do, dstate)
    gradients = module("chunk_gla").chunk_gla_bwd(*arguments)
    for out, ref in zip(gradients, expected_gradients(x, 0.3, do, dstate), strict=True):
        assert (out is None) == (ref is None)
        assert out is None or (out.is_contiguous() and relative_error(out, ref) < 1e-5)


def test_gradients_have_the_dtypes_of_their_inputs(module, fake_fla):
    x = gla_inputs(B=1, T=20, dtype=torch.bfloat16, initial_state=True)
    gradients = module("chunk_gla").chunk_gla_bwd(x.q, x.k, x.v, x.g, 1.0, x.initial_state, None, None, None, x.v, None)
    assert [t.dtype for t in gradients] == [*[torch.bfloat16] * 4, torch.float32]


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 0}, {"B": 0, "T": 9}, {"lengths": (0, 0, 0)}])
@pytest.mark.parametrize("initial_state", [False, True])
def test_calls_without_a_token_never_reach_fla(module, fake_fla, sizes, initial_state):
    x = gla_inputs(**sizes, initial_state=initial_state)
    chunk = module("chunk_gla")
    o, state, _ = chunk.chunk_gla_fwd(x.q, x.k, x.v, x.g, 1.0, x.initial_state, True, x.cu_seqlens, None)
    _, state_ref = oracle.chunk_gla(x.q, x.k, x.v, x.g, 1.0, x.initial_state, x.cu_seqlens)
    assert o.shape == x.v.shape
    assert torch.equal(state.double(), state_ref)
    assert state is not x.initial_state
    arguments = (x.q, x.k, x.v, x.g, 1.0, x.initial_state, x.cu_seqlens, None, None, o, state)
    *gradients, dinitial = chunk.chunk_gla_bwd(*arguments)
    assert [t.shape for t in gradients] == [t.shape for t in (x.q, x.k, x.v, x.g)]
    assert torch.equal(dinitial, state) if initial_state else dinitial is None
    assert fake_fla.calls == []


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("gates", ["none", "-inf"])
def test_step(module, fake_fla, inplace, gates):
    x = gla_inputs(B=3, T=1, gates=gates, initial_state=True)
    state, before = x.initial_state, x.initial_state.clone()
    g = None if x.g is None else x.g[:, 0]
    step = module("recurrent_gla_step").recurrent_gla_step
    o, new = step(x.q[:, 0], x.k[:, 0], x.v[:, 0], g, state, 0.3, None, inplace)
    o_ref, new_ref = oracle.chunk_gla(x.q, x.k, x.v, x.g, 0.3, before)
    assert relative_error(o, o_ref[:, 0]) < 1e-6
    assert relative_error(new, new_ref) < 1e-6
    assert not o._is_view()
    assert (new is state) == inplace
    assert torch.equal(state, new if inplace else before)


def test_a_step_of_nobody_never_reaches_fla(module, fake_fla):
    x, state = torch.zeros(0, 2, 16), torch.zeros(0, 2, 16, 16)
    o, new = module("recurrent_gla_step").recurrent_gla_step(x, x, x, x, state, 1.0, None, True)
    assert (o.shape, new is state, fake_fla.calls) == (x.shape, True, [])


def test_native_is_fla_itself(module, fake_fla):
    x = gla_inputs(B=1, T=4)
    with torch.no_grad():
        o, state = module("native").chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True)
    assert relative_error(o, oracle.chunk_gla(x.q, x.k, x.v, x.g)[0]) < 1e-6
    assert state.shape == (1, 2, 16, 16)


@pytest.fixture
def fake_triton(monkeypatch):
    """The parts of Triton's autotuner that tuning uses."""
    compiled: list[tuple] = []
    autotuner = ModuleType("triton.runtime.autotuner")

    class Config:
        def __init__(self, number):
            self.number = number

        def all_kwargs(self):
            return {"number": self.number}

    class Kernel:
        def __init__(self, name):
            self.name = name

        def run(self, *, warmup, number, grid):
            assert warmup
            if number == 1:
                raise RuntimeError("does not compile")
            compiled.append((self.name, number))

    class Autotuner:
        arg_names = ()

        def __init__(self, name, count):
            self.fn, self.configs = Kernel(name), [Config(i) for i in range(count)]

        def prune_configs(self, kwargs):
            return self.configs[:5]

    autotuner.Autotuner = Autotuner
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, autotuner.__name__, autotuner)
    return Autotuner, compiled


def test_the_shares_compile_everything_once_and_evenly(module, fake_triton):
    Autotuner, compiled = fake_triton
    sizes = []
    for share in range(3):
        module("tune").compile_only(share, 3)
        before = len(compiled)
        for name, count in (("a", 1), ("b", 5), ("c", 8)):
            tuner = Autotuner(name, count)
            tuner.run(grid=(1,), warmup=False)
            assert tuner.best_config is tuner.configs[0]  # mamba_ssm reads it after a launch
        sizes.append(len(compiled) - before)
    expected = [("a", 0), *((name, i) for name in "bc" for i in (0, 2, 3, 4))]  # 1 does not compile, 5 to 7 are pruned
    assert sorted(compiled) == expected
    assert max(sizes) <= 4


def test_a_failing_process_ends_nothing_else(module, tmp_path, capfd):
    write = f"open({str(tmp_path / 'done')!r}, 'w')"
    commands = [[sys.executable, "-Sc", code] for code in ("raise SystemExit(3)", write, "import time; time.sleep(60)")]
    module("tune").run_all(commands, 2.0)
    errors = capfd.readouterr().err
    assert (tmp_path / "done").exists()
    assert "process 0 of 3 ended by 3" in errors
    assert "process 2 of 3 ended by the time limit" in errors


def test_tuning_reports_each_workload_and_goes_on_after_a_failure(module, fake_fla, monkeypatch, capsys):
    tune = module("tune")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def first_calls(workload, backend, device, backward):
        assert (backend, device.type, backward) == ("gla_fla", "cuda", False)
        if workload.name == "decode_b8":
            raise RuntimeError("out of memory")
        return {"first_call": 1.25}

    monkeypatch.setattr(tune, "first_calls", first_calls)
    assert tune.main(["--workload", "decode_b8", "decode_b1", "--processes", "0"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "recurrent_gla_step decode_b8: failed: RuntimeError: out of memory",
        "recurrent_gla_step decode_b1: first_call 1.25 s",
    ]


def test_an_unknown_workload_is_an_error_that_lists_them(module, capsys):
    with pytest.raises(SystemExit):
        module("tune").main(["--workload", "no_such"])
    assert "train_b8_t4096_h16" in capsys.readouterr().err


def test_tuning_says_at_once_what_is_missing(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        module("tune").main(["--workload", "decode_b1"])
    assert "needs a CUDA device and flash-linear-attention==0.6.0" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "where"), [("OutOfResources", "triton.runtime.errors"), ("PTXASError", "elsewhere")])
def test_what_the_compiler_of_triton_raises_is_a_launch_error(module, kind, where):
    error = type(kind, (Exception,), {"__module__": where})("shared memory")

    def kernel():
        raise error

    expected = LaunchError if where.startswith("triton") else type(error)
    with pytest.raises(expected, match="shared memory"):
        module("native").raising_launch_errors(kernel)()
