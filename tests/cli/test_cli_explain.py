"""gla explain."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

import gla_core as gla
from gla_core.cli import explain
from gla_core.cli.calls import DTYPES, GATE_FORMS, SHAPES, describe_call
from gla_core.dispatch.backend import OP_PARAMETERS, Backend, Capabilities

NO_CUDA = "PyTorch sees no CUDA device here"


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_op_has_a_shape():
    assert SHAPES.keys() == OP_PARAMETERS.keys()


def test_the_help_names_every_op_and_dtype(run):
    assert set(re.findall(r"\w+", run("explain", "--help").output)) >= {"chunk_gla", *SHAPES, *DTYPES}


def test_it_prints_the_explanation(run):
    result = run("explain", "chunk_gla_fwd", "--shape", "2,64,4,16,32", "--dtype", "float32", "--device", "cpu")
    assert result.exit_code == 0
    tensors = [torch.empty(2, 64, 4, width) for width in (16, 16, 32, 16)]
    assert result.output == f"{gla.explain('chunk_gla_fwd', *tensors)}\n"


def tensors_of(op: str) -> tuple[str, dict]:
    """Returns a shape, and tensors of that shape as the op receives them."""
    x = torch.empty
    if op.startswith("online_softmax"):
        return "5,7", {"x": x(5, 7)}
    if op in ("recurrent_gla_step", "recurrent_gla_layer_step"):
        return "2,4,16,32", {
            "q": x(2, 8, 16),
            "k": x(2, 4, 16),
            "v": x(2, 4, 32),
            "g": x(2, 4, 16),
            "state": x(2, 4, 16, 32),
        }
    if op == "recurrent_ssd_step":
        tokens = {"q": x(2, 4, 16), "k": x(2, 4, 16), "v": x(2, 4, 32)}
        return "2,4,16,32", {**tokens, "state": x(2, 4, 16, 32), "dt": x(2, 4), "A": x(4)}
    if op == "chunk_gla_pool":
        tokens = {"q": x(1, 64, 8, 16), "k": x(1, 64, 4, 16), "v": x(1, 64, 4, 32), "g": x(1, 64, 4, 16)}
        slots = {"cu_seqlens": torch.tensor([0, 30, 64]), "read_slots": torch.tensor([0, 1])}
        return "1,64,4,16,32,2", {**tokens, "pool": x(2, 4, 16, 32), **slots}
    if op == "recurrent_gla_steps":
        tokens = {"q": x(2, 3, 8, 16), "k": x(2, 3, 4, 16), "v": x(2, 3, 4, 32), "g": x(2, 3, 4, 16)}
        return "2,3,4,16,32", {**tokens, "pool": x(2, 4, 16, 32), "slots": torch.tensor([[0, 1, -1], [-1, -1, -1]])}
    if op == "recurrent_gla_replay":
        tokens = {"q": x(2, 3, 8, 16), "k": x(2, 3, 4, 16), "v": x(2, 3, 4, 32), "g": x(2, 3, 4, 16)}
        rings = {"ring_k": x(2, 6, 4, 16), "ring_v": x(2, 6, 4, 32), "ring_g": x(2, 6, 4, 16)}
        numbers = dict.fromkeys(("slots", "ring_start", "num_accepted"), torch.tensor([0, 1]))
        return "2,3,4,16,32,6", {**tokens, "pool": x(2, 4, 16, 32), **rings, **numbers}
    if op == "chunk_gla_summary":
        return "2,64,4,16,32", {"k": x(2, 64, 4, 16), "v": x(2, 64, 4, 32), "g": x(2, 64, 4, 16)}
    qkv = {"q": x(2, 64, 8, 16), "k": x(2, 64, 4, 16), "v": x(2, 64, 4, 32)}
    return "2,64,4,16,32", qkv if op.startswith("softmax_attention") else {**qkv, "g": x(2, 64, 4, 16)}


@pytest.mark.parametrize("op", SHAPES)
def test_numbers_describe_the_same_call_as_tensors(op):
    shape, tensors = tensors_of(op)
    heads = None if op in ("online_softmax", "online_softmax_bwd", "chunk_gla_summary", "recurrent_ssd_step") else 8
    assert describe_call(op, shape, heads, "float32", "cpu", None) == without_layouts(gla.explain(op, **tensors).call)


def without_layouts(call):
    """Returns the call without layouts, as a description by sizes gives it."""
    return dataclasses.replace(call, layouts={})


@pytest.mark.parametrize("form", GATE_FORMS)
@pytest.mark.parametrize("op", ["chunk_gla_fwd", "chunk_gla_bwd", "chunk_gla_summary", "recurrent_gla_step"])
def test_gates_of_every_form_and_value_heads_describe_the_same_call_as_tensors(op, form):
    tokens = () if op == "recurrent_gla_step" else (64,)
    gates = {"none": None, "constant": (8,), "head": (2, *tokens, 8), "key": (2, *tokens, 8, 16)}[form]
    shapes = {"q": (2, *tokens, 4, 16), "k": (2, *tokens, 4, 16), "v": (2, *tokens, 8, 32), "g": gates}
    shapes |= {"state": (2, 8, 16, 32)} if op == "recurrent_gla_step" else {}
    if op == "chunk_gla_summary":
        shapes.pop("q")
    tensors = {name: None if shape is None else torch.empty(shape) for name, shape in shapes.items()}
    shape = ",".join(map(str, (2, *tokens, 4, 16, 32)))
    call = describe_call(op, shape, None, "float32", "cpu", value_heads=8, gate=form)
    assert call == without_layouts(gla.explain(op, **tensors).call)


def test_the_forms_are_options(run):
    arguments = ("explain", "chunk_gla", "--shape", "1,64,2,16,32", "--device", "cpu", "--value-heads", "6")
    result = run(*arguments, "--gate", "head")
    assert result.exit_code == 0
    first = "chunk_gla_fwd  B=1 T=64 H=2 Hq=2 Hv=6 K=16 V=32 N=1  bfloat16 on cpu, gates per head"
    assert result.output.splitlines()[0] == first
    for form in GATE_FORMS:
        actual = json.loads(run(*arguments, "--gate", form, "--json").stdout)
        assert (actual["gate_form"], actual["dims"]["Hv"]) == (None if form == "none" else form, 6)
    assert json.loads(run(*arguments, "--json").stdout)["gate_form"] == "key"


def test_packed_sequences_describe_the_same_call_as_tensors():
    q, v = torch.empty(1, 64, 4, 16, dtype=torch.float64), torch.empty(1, 64, 4, 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 10, 30, 64])
    call = gla.explain("chunk_gla_bwd", q, q, v, q, cu_seqlens=cu_seqlens).call
    assert describe_call("chunk_gla_bwd", "1,64,4,16,32", None, "float64", "cpu", 3) == without_layouts(call)


def test_steps_of_packed_sequences_have_a_slot_for_each_token_of_a_sequence():
    for shape, sequences, S in (("2,8,4,16,32", None, 8), ("1,23,4,16,32", 3, 8), ("1,0,4,16,32", None, 1)):
        assert describe_call("recurrent_gla_steps", shape, device="cpu", varlen=sequences).dims["S"] == S


def test_the_gradient_summary_is_the_summary_backwards():
    call = describe_call("chunk_gla_gradient_summary", "2,64,4,16,32", 8, "float32", "cpu")
    q, do, g = torch.empty(2, 64, 8, 16), torch.empty(2, 64, 8, 32), torch.empty(2, 64, 4, 16)
    assert call == without_layouts(gla.explain("chunk_gla_gradient_summary", q, do, g).call)


def test_chunk_gla_stands_for_its_forward():
    short, long = (describe_call(op, "1,64,4,16,32", device="cpu") for op in ("chunk_gla", "chunk_gla_fwd"))
    assert short == long


def test_json(run):
    result = run("explain", "online_softmax", "--shape", "3,9", "--device", "cpu", "--backend", "reference", "--json")
    assert result.exit_code == 0
    explanation = json.loads(result.stdout)
    (candidate,) = explanation.pop("candidates")
    assert explanation == {
        "op": "online_softmax",
        "dims": {"rows": 3, "columns": 9},
        "dtype": "bfloat16",
        "device": "cpu",
        "assumed": None,
        "gate_form": None,
        "gate_normalizer": None,
        "variable_length": False,
        "longest": None,
        "request": "reference",
        "source": "backend=",
        "winner": "reference",
        "fastest": None,
        "why": "reference: the one asked for, by backend=",
    }
    assert candidate.keys() == {"name", "seconds", "worst", "refusal", "constants", "measured", "failure", "kernels"}
    assert (candidate["name"], candidate["refusal"], candidate["measured"]) == ("reference", None, None)


def test_the_environment_is_asked(run, set_environment):
    set_environment(GLA_BACKEND="reference")
    result = run("explain", "online_softmax", "--shape", "3,9", "--device", "cpu", "--json")
    assert json.loads(result.stdout)["source"] == "GLA_BACKEND"


def test_nobody_can_run_it(run):
    narrow = Backend(
        "narrow", "1", {"online_softmax": lambda x, dim: x}, Capabilities(dtypes=frozenset({torch.float16}))
    )
    with gla.register(narrow):
        result = run("explain", "online_softmax", "--shape", "3,9", "--device", "cpu", "--backend", "narrow")
    assert result.exit_code == 1
    assert "computes float16; x is bfloat16" in result.output


def test_cuda_without_cuda_is_refused_plainly(run, without_cuda, own_backends):
    sm80 = Backend(
        "sm80",
        "1",
        {"online_softmax": lambda x, dim: x},
        Capabilities(devices=frozenset({"cuda"}), min_compute_capability=(8, 0)),
    )
    arguments = ("--shape", "3,9", "--dtype", "float32", "--device", "cuda", "--json")
    with gla.register(sm80):
        result = run("explain", "online_softmax", *arguments)
    assert result.exit_code == 1
    explanation = json.loads(result.stdout)
    assert explanation["winner"] is None
    assert explanation["device"] == "cuda:0"
    refusals = {candidate["name"]: candidate["refusal"] for candidate in explanation["candidates"]}
    assert refusals.keys() >= {"sm80", *own_backends}
    assert all(refusal.startswith(NO_CUDA) for refusal in refusals.values())


def test_a_device_that_is_not_here_is_assumed(run, without_cuda, own_backends):
    result = run("explain", "chunk_gla", "--shape", "8,4096,16,128,128", "--assume", "NVIDIA H200", "--json")
    assert result.exit_code == 0
    explanation = json.loads(result.stdout)
    assert (explanation["device"], explanation["assumed"]) == ("cuda:0", "NVIDIA H200")
    candidates = {candidate["name"]: candidate for candidate in explanation["candidates"]}
    assert candidates["reference"]["constants"] == "shipped for NVIDIA H200"
    assert candidates["reference"]["seconds"] == pytest.approx(7.7e-3, rel=0.1)  # measured on an H200: 7.72 ms
    assert not any((candidates[name]["refusal"] or "").startswith(NO_CUDA) for name in own_backends)


@pytest.mark.parametrize(
    ("short", "name"),
    [("H200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3"), ("nvidia h100", "NVIDIA H100 80GB HBM3")],
)
def test_a_short_name_is_enough_for_a_known_device(short, name):
    call = describe_call("online_softmax", "3,9", assume=short)
    assert call == describe_call("online_softmax", "3,9", assume=name)
    assert call.assumed.name == name


def test_an_assumed_device_has_a_compute_capability(run, without_cuda):
    newer = Capabilities(devices=frozenset({"cuda"}), min_compute_capability=(10, 0))
    with gla.register(Backend("newer", "1", {"online_softmax": lambda x, dim: x}, newer)):
        result = run("explain", "online_softmax", "--shape", "3,9", "--assume", "NVIDIA H200", "--backend", "newer")
    assert result.exit_code == 1
    assert "on NVIDIA H200 (assumed)" in result.output
    assert "needs compute capability 10.0; the assumed NVIDIA H200 has 9.0" in result.output


def test_what_does_not_fit_into_memory_is_not_measured(run, monkeypatch):
    monkeypatch.setattr(explain, "random_arguments", lambda call: pytest.fail("memory was asked for"))
    shape = ("chunk_gla_bwd", "--shape", "8,40960000,16,128,128", "--dtype", "bfloat16", "--device", "cpu")
    result = run("explain", *shape, "--measure")
    assert result.exit_code == 2
    # q k v g do are read, and dq dk dv dg written: 2816 bytes for a token of a head.
    assert f"this call needs at least {2816 * 8 * 40960000 * 16 / 2**30:,.1f} GiB and cpu has" in result.output


def test_memory_that_others_hold_is_no_traceback(run, monkeypatch):
    def arguments_for(call):
        raise RuntimeError("can't allocate memory\nC++ frames")

    monkeypatch.setattr(explain, "random_arguments", arguments_for)
    result = run("explain", "online_softmax", "--shape", "2,3", "--device", "cpu", "--measure")
    assert (result.exit_code, result.stderr) == (
        2,
        "gla explain: this call cannot be measured: can't allocate memory\n",
    )


def test_a_typo_is_found_without_cuda_too(run, without_cuda):
    arguments = ("explain", "online_softmax", "--shape", "3,9", "--device", "cuda", "--backend", "refrence")
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chunk_gla_fw", "--shape", "1,2,3,4,5"], "unknown op 'chunk_gla_fw'; did you mean 'chunk_gla_fwd'?"),
        (["chunk_glaa", "--shape", "1,2,3,4,5"], "unknown op 'chunk_glaa'; did you mean 'chunk_gla'?"),
        (["chunk_gla_fwd", "--shape", "1,2,3,4"], "has 4 values; chunk_gla_fwd expects 5 whole numbers: B,T,H,K,V"),
        (["recurrent_gla_step", "--shape", "1,1,2,3,4"], "has 5 values; recurrent_gla_step expects 4"),
        (["softmax_attention", "--shape", "1,2"], "softmax_attention expects 5 whole numbers: B,T,H,K,V"),
        (["online_softmax", "--shape", "1"], "online_softmax expects 2 whole numbers: ROWS,COLUMNS"),
        (["online_softmax", "--shape", "1,x"], "expects 2 whole numbers"),
        (["online_softmax", "--shape", "1,-2"], "COLUMNS is '-2'; online_softmax expects 2 whole numbers"),
        (["chunk_gla", "--shape=-1,2,3,4,5"], "--shape '-1,2,3,4,5': B is '-1'; chunk_gla_fwd expects 5 whole numbers"),
        (["chunk_gla_fwd", "--shape", "1,2,3,0,5"], "K is 0; expected at least 1"),
        (["chunk_gla_fwd", "--shape", "1,2,3,4,5", "--query-heads", "4"], "is 4; expected a multiple of H = 3"),
        (["online_softmax", "--shape", "1,2", "--query-heads", "4"], "--query-heads does not go with online_softmax"),
        (["chunk_gla_fwd", "--shape", "1,2,3,4,5", "--value-heads", "4"], "is 4; expected a multiple of H = 3"),
        (["online_softmax", "--shape", "1,2", "--value-heads", "4"], "--value-heads does not go with online_softmax"),
        (["softmax_attention", "--shape", "1,2,3,4,5", "--value-heads", "6"], "whose values have the heads of its"),
        (
            ["chunk_gla", "--shape", "1,2,3,4,5", "--query-heads", "6", "--value-heads", "6"],
            "--query-heads and --value-heads are both above H = 3; expected one of them",
        ),
        (["chunk_gla", "--shape", "1,2,3,4,5", "--gate", "heads"], "form of gates 'heads'; did you mean 'head'?"),
        (["softmax_attention", "--shape", "1,2,3,4,5", "--gate", "key"], "--gate does not go with softmax_attention"),
        (["chunk_gla_fwd", "--shape", "2,2,3,4,5", "--varlen", "4"], "expected B = 1 and not B = 2"),
        (["chunk_gla_fwd", "--shape", "1,2,3,4,5", "--varlen", "-2"], "--varlen is -2; expected the number of"),
        (["recurrent_gla_steps", "--shape", "2,9,2,16,16"], "slots has 9 columns; expected 1 to 8"),
        (["recurrent_gla_steps", "--shape", "1,27,2,16,16", "--varlen", "3"], "slots has 9 columns; expected 1 to 8"),
        (["recurrent_gla_replay", "--shape", "1,9,4,32,32,8"], "each sequence and ring_k has L = 8; expected L of"),
        (["recurrent_gla_replay", "--shape", "1,2,4,32,32,99"], "ring_k has L = 99 tokens; expected 2 to 16"),
        (["chunk_gla_pool", "--shape", "2,2,3,4,5,1"], "chunk_gla_pool packs sequences along T: expected B = 1"),
        (["softmax_attention", "--shape", "1,2,3,4,5", "--varlen", "4"], "--varlen does not go with softmax_attention"),
        (["chunk_gla_fwd", "--shape", "1,2,3,4,5", "--max-seqlen", "4"], "expected --varlen, and a length"),
        (["online_softmax", "--shape", "1,2", "--dtype", "float23"], "'float23'; did you mean 'float32'?"),
        (["online_softmax", "--shape", "1,2", "--device", "gpu"], "unknown device 'gpu'; expected auto, cpu, cuda"),
        (["online_softmax", "--shape", "1,2", "--backend", "refrence"], "'refrence'; did you mean 'reference'?"),
        (["online_softmax", "--shape", "1,2", "--backend", "a b"], "cannot read 'a b'"),
        (["online_softmax", "--shape", "1,2", "--backend", "softmx=reference"], "unknown op 'softmx'"),
        (["online_softmax", "--shape", "1,2", "--device", "cuda:99999999999999999999"], "unknown device 'cuda:9999"),
        (["online_softmax", "--shape", "1,2", "--assume", "A100"], "is not a known device; expected NVIDIA H200 or NV"),
        (["online_softmax", "--shape", "1,2", "--assume", "nvidia"], "'nvidia' names several devices; expected"),
        (["online_softmax", "--shape", "1,2", "--assume", ""], "--assume '' is not a known device"),
        (["online_softmax", "--shape", "1,2", "--assume", "NVIDIA H200", "--device", "cpu"], "leave out --device cpu"),
        (["online_softmax", "--shape", "1,2", "--assume", "NVIDIA H200", "--measure"], "leave out --measure"),
        (["online_softmax"], "--shape"),
    ],
)  # fmt: skip
def test_bad_usage(run, arguments, message):
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert message in result.output
