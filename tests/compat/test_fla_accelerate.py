"""Replacing functions of flash-linear-attention, in fake modules with its structure."""

import copy
import inspect
import pickle
import sys
import threading
import traceback
import types
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gla_core.compat.fla import accelerate, on_cpu, use_gla_core
from gla_core.compat.fla.accelerate import HOMES

pytestmark = pytest.mark.filterwarnings("ignore:there is no GPU")
GLA = HOMES["fla.ops.gla"]


def module(name, **members):
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def layer_class(home):
    """Returns a layer that chooses its function by its mode and passes offsets to `chunk_gla` only, as GLA does."""

    class Layer(torch.nn.Module):
        def __init__(self, mode="chunk"):
            super().__init__()
            self.mode = mode

        def forward(self, q, k, v, g, cu_seqlens=None):
            if self.mode == "fused_chunk":
                return sys.modules[home].fused_chunk_gla(q=q, k=k, v=v, g=g)[0]
            return sys.modules[home].chunk_gla(q=q, k=k, v=v, g=g, cu_seqlens=cu_seqlens)[0]

    Layer.__module__ = home
    return Layer


@pytest.fixture
def fla(monkeypatch):
    """Fake modules `fla...` whose functions return their name and their arguments."""

    def original(name):
        def function(*args, **kwargs):
            return name, args, kwargs

        function.__name__ = name
        return function

    functions = {name: original(name) for name in GLA}
    others = {home: {name: original(name) for name in HOMES[home]} for home in HOMES if home != "fla.ops.gla"}
    layer = {name: functions[name] for name in ("chunk_gla", "fused_recurrent_gla")}
    repeat = original("repeat")
    modules = [
        module("fla", chunk_gla="not a function of ours"),
        module("fla.ops", **functions),
        module("fla.ops.gla", **functions, other=original("other")),
        module("fla.layers.gla", **functions, repeat=repeat, GatedLinearAttention=layer_class("fla.layers.gla")),
        module("fla.layers.gsa", repeat=repeat),
        module("fla.layers.hgrn2", **functions, HGRN2Attention=layer_class("fla.layers.hgrn2")),
        module("fla.layers.lightnet", **layer),
        module("flat.ops", **functions),
        *(module(home, **members) for home, members in others.items()),
        module("fla.layers.simple_gla", **others["fla.ops.simple_gla"]),
        module("fla.ops.lightnet.chunk", chunk_lightnet=others["fla.ops.lightnet"]["chunk_lightnet"]),
    ]
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return {each.__name__: each for each in modules}


def originals(fla):
    return {name: dict(vars(each)) for name, each in fla.items()}


def tokens(T=3):
    q, k, v, g = (torch.randn(1, T, 2, d) for d in (4, 4, 5, 4))
    return q, k, v, -g.exp()


def test_all_are_replaced_wherever_they_are_and_put_back(fla):
    before = originals(fla)
    acceleration = accelerate()
    layer = fla["fla.layers.gla"]
    q, k, v, g = tokens()
    o, state = layer.chunk_gla(q=q, k=k, v=v, g=g, output_final_state=True, state_v_first=True)
    assert (o.shape, state.shape) == (v.shape, (1, 2, 5, 4))
    assert layer.fused_recurrent_gla(q, k, v, g)[0].shape == v.shape
    assert fla["fla.ops.gla"].fused_chunk_gla(q, k, v, g)[0].shape == v.shape
    most = ("fla.layers.gla", "fla.layers.hgrn2", "fla.ops", "fla.ops.gla")
    everywhere = ("fla.layers.gla", "fla.layers.hgrn2", "fla.layers.lightnet", "fla.ops", "fla.ops.gla")
    others = {name: (home,) for home, members in HOMES.items() for name in members}
    others |= dict.fromkeys(HOMES["fla.ops.simple_gla"], ("fla.layers.simple_gla", "fla.ops.simple_gla"))
    assert acceleration.replaced == others | {
        "chunk_lightnet": ("fla.ops.lightnet", "fla.ops.lightnet.chunk"),
        "chunk_gla": everywhere,
        "fused_chunk_gla": most,
        "fused_recurrent_gla": everywhere,
        "repeat": ("fla.layers.gla",),
        "mode": ("fla.layers.gla", "fla.layers.hgrn2"),
    }
    lines = str(acceleration).splitlines()
    assert lines[0] == "17 modules of flash-linear-attention now call gla_core; see `replaced`:"
    assert lines[1].startswith("- computed by gla_core: chunk_gla, fused_chunk_gla, ")
    said = " ".join(" ".join(lines).split())
    assert 'on a GPU, so are sequences in float32 under the matmul precision "highest"' in said
    assert "- computed by gla_core on a CPU and on Hopper in bfloat16, else the original: chunk_lightnet, " in said
    assert len(lines) < 30
    assert max(map(len, lines)) < 80
    assert vars(fla["flat.ops"]) == before["flat.ops"]
    assert fla["fla"].chunk_gla == "not a function of ours"
    acceleration.undo()
    assert originals(fla) == before
    assert "nothing" in str(acceleration)


def test_states_of_layers_have_values_first_whatever_their_mode(fla):
    q, k, v, g = tokens(70)
    with accelerate():
        layer = fla["fla.layers.gla"]
        _, state = layer.fused_chunk_gla(q=q, k=k, v=v, g=g, initial_state=None, output_final_state=True)
        _, expected = layer.chunk_gla(q=q, k=k, v=v, g=g, output_final_state=True, state_v_first=True)
    assert torch.equal(state, expected)
    assert state.shape == (1, 2, 5, 4)


def test_key_value_heads_are_handed_over_once(fla):
    layer, x = fla["fla.layers.gla"], torch.randn(2, 3, 8)
    heads = "... (h d) -> ... (h g) d"
    with accelerate() as acceleration:
        assert torch.equal(layer.repeat(x, heads, g=2, d=4), x.reshape(2, 3, 2, 4))
        assert layer.repeat(x, "b t d -> b t d g", g=2)[0] == "repeat"
        assert fla["fla.layers.gsa"].repeat(x, heads, g=2, d=4)[0] == "repeat"
        assert "\n- left out for key/value heads: repeat\n" in str(acceleration)
    for some in ({"chunk_gla"}, {"chunk_gla", "fused_recurrent_gla"}):  # functions that are not replaced need all heads
        with accelerate(*some):
            assert layer.repeat(x, heads, g=2, d=4)[0] == "repeat"
            with accelerate():
                assert layer.repeat(x, heads, g=2, d=4).shape == (2, 3, 2, 4)
            assert layer.repeat(x, heads, g=2, d=4)[0] == "repeat"
    assert layer.repeat(x, heads, g=2, d=4)[0] == "repeat"


@pytest.mark.parametrize("name", list(GLA))
@pytest.mark.parametrize("T", [1, 70])
def test_states_are_those_of_query_heads(fla, name, T):
    q, k, v, g = (torch.randn(1, T, heads, d) for heads, d in ((4, 4), (2, 4), (2, 5), (2, 4)))
    repeated = [x.repeat_interleave(2, 2) for x in (k, v, -g.exp())]
    state = torch.randn(1, 2, 5, 4).repeat_interleave(2, 1)
    options = {"initial_state": state, "output_final_state": True}
    options |= {} if name == "fused_chunk_gla" else {"state_v_first": True}
    with accelerate(), torch.no_grad():
        function = getattr(fla["fla.layers.gla"], name)
        actual, expected = function(q, k, v, -g.exp(), **options), function(q, *repeated, **options)
    torch.testing.assert_close(actual, expected)


def test_modules_that_are_imported_later(fla, monkeypatch):
    with accelerate("chunk_gla") as acceleration:
        later = module("fla.layers.later", chunk_gla=fla["fla.ops.gla"].chunk_gla)
        monkeypatch.setitem(sys.modules, later.__name__, later)
        assert later.chunk_gla(*tokens())[0].shape == (1, 3, 2, 5)
        assert list(acceleration.replaced) == ["chunk_gla"]
        assert fla["fla.ops.gla"].fused_chunk_gla(1)[0] == "fused_chunk_gla"
    assert later.chunk_gla(1) == ("chunk_gla", (1,), {})


def test_twice_is_once(fla):
    before = originals(fla)
    first = accelerate()
    inside = originals(fla)
    with accelerate() as second:
        assert second.replaced == {}
    assert originals(fla) == inside
    first.undo()
    first.undo()
    assert originals(fla) == before


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_function_stays_replaced_until_the_last_that_asked_for_it_ends(fla, first_ends_first):
    before, home = originals(fla), fla["fla.layers.gla"]
    one, all_of_them = accelerate("chunk_gla"), accelerate()
    accelerated = originals(fla)
    if first_ends_first:
        one.undo()
        assert originals(fla) == accelerated
        assert home.repeat(torch.ones(1, 4), "... (h d) -> ... (h g) d", g=2, d=2).shape == (1, 2, 2)
        all_of_them.undo()
    else:
        all_of_them.undo()
        assert home.chunk_gla(*tokens())[0].shape == (1, 3, 2, 5)
        assert home.fused_recurrent_gla(1)[0] == "fused_recurrent_gla"
        one.undo()
    assert originals(fla) == before


def test_in_several_threads(fla):
    before, home, wrong = originals(fla), fla["fla.layers.gla"], []
    start = threading.Barrier(4)

    def run():
        start.wait()
        for _ in range(20):
            with accelerate():
                results = (
                    home.chunk_gla(*tokens())[0],
                    home.repeat(torch.ones(1, 4), "... (h d) -> ... (h g) d", g=1, d=2),
                )
                wrong.extend(x for x in results if not isinstance(x, torch.Tensor))

    threads = [threading.Thread(target=run) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert originals(fla) == before


def test_a_reference_that_is_kept_calls_the_original_once_all_is_undone(fla):
    with accelerate():
        kept = fla["fla.ops.gla"].chunk_gla
        assert isinstance(kept(*tokens())[0], torch.Tensor)
    assert kept(1, g=2) == ("chunk_gla", (1,), {"g": 2})
    with accelerate():
        assert isinstance(kept(*tokens())[0], torch.Tensor)


def ops_function(fla, name):
    """Returns a function of `fla.ops.gla`, and a module that holds it."""
    layer = torch.nn.Module()
    layer.function = getattr(fla["fla.ops.gla"], name)
    return layer.function, layer


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", GLA)
def test_copies_obey_undo(fla, name, again):
    original, _ = ops_function(fla, name)
    acceleration = accelerate()
    new, layer = ops_function(fla, name)
    made = again(layer)
    assert again(new) is new is made.function
    acceleration.undo()
    assert made.function(1, 2) == (name, (1, 2), {})
    assert again(made).function is original
    with accelerate():
        assert again(made).function is new


def test_a_pickle_names_no_package_of_ours(fla):
    """Another process, which may lack this package, reads the original."""
    with accelerate():
        pickled = pickle.dumps(ops_function(fla, "chunk_gla")[0])
    assert b"gla_core" not in pickled
    assert b"fla.ops.gla:chunk_gla" in pickled


def test_signatures_are_those_of_the_originals(fla):
    def chunk_gla(q, k, *, scale: float = 2.0):
        """Their function."""

    chunk_gla._torchdynamo_disable = True
    for name in ("fla.ops.gla", "fla.layers.gla"):
        fla[name].chunk_gla = chunk_gla
    with accelerate("chunk_gla"):
        replaced = fla["fla.layers.gla"].chunk_gla
        assert replaced is not chunk_gla
        assert inspect.signature(replaced) == inspect.signature(chunk_gla)
        assert (replaced.__name__, replaced.__doc__, replaced.__module__) == ("chunk_gla", "Their function.", __name__)
        assert not hasattr(replaced, "_torchdynamo_disable")


@pytest.mark.parametrize(("home", "name"), [("gla", "GatedLinearAttention"), ("hgrn2", "HGRN2Attention")])
def test_sequences_stay_apart_in_every_mode(fla, home, name):
    Layer = getattr(fla[f"fla.layers.{home}"], name)
    q, k, v, g = tokens(9)
    offsets = torch.tensor([0, 4, 9])
    before = Layer("fused_chunk")
    with accelerate():
        expected = torch.cat([Layer()(*(x[:, part] for x in (q, k, v, g))) for part in (slice(4), slice(4, 9))], 1)
        for layer in (Layer("chunk"), Layer("fused_chunk"), before):
            torch.testing.assert_close(layer(q, k, v, g, offsets), expected)
    assert (Layer("chunk").mode, Layer("fused_chunk").mode, layer.mode) == ("chunk", "fused_chunk", "fused_chunk")
    with accelerate("chunk_gla", "fused_recurrent_gla") as acceleration:
        assert Layer("fused_chunk").mode == "fused_chunk"
        assert "mode" not in acceleration.replaced


def test_after_an_error_all_is_as_before(fla):
    before = originals(fla)
    with pytest.raises(RuntimeError, match="mine"), accelerate():
        raise RuntimeError("mine")
    assert originals(fla) == before


def test_what_is_not_computed_here_is_left_to_the_original(fla):
    with accelerate():
        recurrent = fla["fla.layers.gla"].fused_recurrent_gla
        for args, kwargs in (((1, 2, 3), {"gv": 4}), ((1, 2, 3, None, 5), {})):
            assert recurrent(*args, **kwargs) == ("fused_recurrent_gla", args, kwargs)
        q, k, v, g = tokens()
        assert recurrent(q, k, v, g, None, reverse=True)[0].shape == v.shape
        kda, gated = fla["fla.ops.kda"], fla["fla.ops.gated_delta_rule"]
        beta = torch.rand(1, 3, 2)
        for function, args, kwargs in (
            (kda.chunk_kda, (q, k, v, g, beta), {"cp_context": 1}),
            (kda.chunk_kda, (q, k, v, g, beta), {"return_intermediate_states": True}),
            (kda.fused_recurrent_kda, (q, k, v, g, v), {}),
            (gated.fused_recurrent_gdn, (q, k, v, g[..., 0], g, None, beta), {}),
            (gated.fused_recurrent_gated_delta_rule, (q, k, v), {"gv": v}),
        ):
            assert function(*args, **kwargs) == (function.__name__, args, kwargs)
            assert function(q, k, v, g=g[..., 0], beta=beta)[0].shape == v.shape
        parallel = fla["fla.ops.retention"].parallel_retention
        assert parallel(q, k, v, output_attentions=True)[0] == "parallel_retention"
        assert parallel(q, k, v)[0].shape == v.shape


@pytest.mark.parametrize("home", ["linear_attn", "lightnet", "gsa", "rwkv6"])
def test_compositions_are_computed_here_on_a_cpu_and_not_on_every_device(fla, home):
    q, k, v, g = tokens()
    arguments = {"gsa": (q, k, v, g), "rwkv6": (q, k, v, g, torch.ones(2, 4))}.get(home, (q, k, v))
    with accelerate():
        for name in HOMES[f"fla.ops.{home}"]:
            function = getattr(fla[f"fla.ops.{home}"], name)
            assert function(*arguments)[0].shape == v.shape
            assert function(*(x.to("meta") for x in arguments))[0] == name
            if home == "linear_attn":
                assert function(*(x.to("meta") for x in arguments), normalize=False)[0].shape == v.shape


@pytest.mark.parametrize(
    ("dtype", "precision", "T", "autocast", "left"),
    [
        (torch.float32, "highest", 3, False, True),
        (torch.float32, "high", 3, False, False),
        (torch.float32, "highest", 1, False, False),  # a decoding step has no matrix products
        (torch.float32, "highest", 3, True, False),
        (torch.bfloat16, "highest", 3, False, False),
    ],
)
def test_float32_without_tf32_on_a_gpu_is_left_to_the_original(fla, monkeypatch, dtype, precision, T, autocast, left):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    try:
        torch.set_float32_matmul_precision(precision)
        with accelerate(), FakeTensorMode():
            shapes = ((1, T, 2, 4), (1, T, 8), (1, T, 2))
            q, x, beta = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
            for name in ("chunk_gla", "fused_recurrent_gla"):
                assert bool(getattr(fla["fla.layers.gla"], name).left_out(q, q, q, q)) is left
            assert bool(fla["fla.ops.retention"].chunk_retention.left_out(q=q, k=q, v=q)) is left
            assert bool(fla["fla.ops.linear_attn"].chunk_linear_attn.left_out(q, q, q, normalize=False)) is left
            assert fla["fla.ops.linear_attn"].chunk_linear_attn.left_out(q, q, q)
            assert fla["fla.ops.kda"].chunk_kda.left_out(q, q, q, q, beta)  # K is 4
            assert fla["fla.ops.delta_rule"].chunk_delta_rule.left_out(q, q, q, beta)
            # the original needs all heads
            assert bool(fla["fla.layers.gla"].repeat.left_out(x, "... (h d) -> ... (h g) d", g=2, d=4)) is left
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dtype", "K", "V", "capability", "by_key", "others"),
    [
        (torch.bfloat16, 128, 128, (9, 0), True, True),
        (torch.bfloat16, 64, 96, (9, 0), True, True),
        (torch.bfloat16, 32, 32, (9, 0), False, False),
        (torch.bfloat16, 96, 192, (9, 0), False, True),
        (torch.bfloat16, 256, 512, (9, 0), False, True),
        (torch.bfloat16, 264, 128, (9, 0), False, False),
        (torch.float16, 128, 128, (9, 0), False, False),
        (torch.bfloat16, 128, 128, (8, 0), False, False),
        (torch.bfloat16, 128, 128, (10, 0), False, False),
    ],
)
def test_delta_rules_on_a_gpu_are_those_of_the_kernels_for_hopper(
    fla, monkeypatch, dtype, K, V, capability, by_key, others
):
    """Wider heads are computed here without a gate for each key, with gradients and without."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with accelerate(), FakeTensorMode():
        q, v, g, beta = (torch.empty(1, 8, 2, *d, dtype=dtype, device="cuda") for d in ((K,), (V,), (K,), ()))
        assert (fla["fla.ops.kda"].chunk_kda.left_out(q, q, v, g, beta) is None) is by_key
        gated, plain = (
            fla["fla.ops.gated_delta_rule"].chunk_gated_delta_rule,
            fla["fla.ops.delta_rule"].chunk_delta_rule,
        )
        for trained in (False, True):
            beta.requires_grad_(trained)
            assert (gated.left_out(q, q, v, beta, beta) is None) is others
            assert (plain.left_out(q, q, v, beta) is None) is others
        assert fla["fla.ops.kda"].chunk_kda.left_out(q, q, v, g, beta, cp_context=1)


@pytest.mark.parametrize(
    ("dtype", "K", "T", "capability", "families"),
    [
        (torch.bfloat16, 64, 8, (9, 0), {"gsa", "rwkv6", "lightnet"}),
        (torch.bfloat16, 64, 1, (9, 0), {"gsa", "rwkv6", "lightnet"}),
        (torch.bfloat16, 256, 8, (9, 0), {"gsa", "rwkv6", "lightnet"}),
        (torch.bfloat16, 256, 1, (9, 0), {"rwkv6", "lightnet"}),
        (torch.float32, 64, 8, (9, 0), set()),
        (torch.bfloat16, 64, 8, (8, 0), set()),
    ],
)
def test_compositions_on_a_gpu_are_those_that_were_measured(fla, monkeypatch, dtype, K, T, capability, families):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with accelerate(), FakeTensorMode():
        q, s, u = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((1, T, 2, K), (1, T, 2, 16), (2, K)))
        arguments = {"gsa": (q, q, q, s, s), "rwkv6": (q, q, q, q, u), "lightnet": (q, q, q), "linear_attn": (q, q, q)}
        for family, passed in arguments.items():
            function = getattr(fla[f"fla.ops.{family}"], f"chunk_{family}")
            assert (function.left_out(*passed) is None) is (family in families), family
        w = q.float()  # a gate, which a call may name first
        assert (fla["fla.ops.rwkv6"].chunk_rwkv6.left_out(w=w, k=q, v=q, u=u, r=q) is None) is ("rwkv6" in families)


def test_a_gate_for_each_head(fla):
    q, k, v, _ = tokens()
    g = -torch.rand(1, 3, 2)
    with accelerate("chunk_simple_gla", "chunk_retention") as acceleration:
        chunk_simple_gla = fla["fla.layers.simple_gla"].chunk_simple_gla
        o, state = chunk_simple_gla(q, k, v, g, output_final_state=True, state_v_first=True)
        assert (o.shape, state.shape) == (v.shape, (1, 2, 5, 4))
        assert fla["fla.ops.retention"].chunk_retention(q, k, v)[0].shape == v.shape
        assert fla["fla.ops.simple_gla"].parallel_simple_gla(1)[0] == "parallel_simple_gla"
        assert set(acceleration.replaced) == {"chunk_simple_gla", "chunk_retention"}


def test_a_name_that_is_not_known(fla):
    with pytest.raises(ValueError, match=r"unknown function 'chunk_glaa'; did you mean 'chunk_gla'\?"):
        accelerate("chunk_glaa")


@pytest.mark.parametrize("missing", ["fla", "fla.ops.gla"])
def test_without_flash_linear_attention(monkeypatch, missing):
    for name in {"fla", "fla.ops", "fla.ops.gla"} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    if missing != "fla":
        for name in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
    monkeypatch.setitem(sys.modules, missing, None)
    message = r"^accelerate\(\) finds no module fla[.a-z]*; install 0.6.0: pip install 'flash-linear-attention==0.6.0' "
    with pytest.raises(ImportError, match=message) as caught:
        accelerate()
    assert "".join(traceback.format_exception(caught.value)).count("\n") < 12


def test_a_package_that_flash_linear_attention_needs_is_named(monkeypatch, tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("import a_package_that_is_missing")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'a_package_that_is_missing'"):
        accelerate()


@pytest.mark.parametrize(
    ("theirs", "transformers", "gpu", "said"),
    [
        ("0.6.0", "5.23.0", True, []),
        ("0.6.1.post1", None, True, []),
        ("0.5.9", "5.23.0", True, ["flash-linear-attention is 0.5.9; accelerate() knows 0.6"]),
        ("1.0", "6.0", True, ["flash-linear-attention is 1.0; "]),
        ("0.6.0", "5.24.0.dev0", True, ["generate` forgets its cache under transformers 5.24"]),
        ("0.6.0", "6.0.0", False, ["pip install 'transformers<5.24'", "accelerate(cpu=True) computes them on a CPU"]),
    ],
)
def test_what_its_user_has_to_know(fla, monkeypatch, theirs, transformers, gpu, said):
    fla["fla"].__version__ = theirs
    monkeypatch.setitem(sys.modules, "transformers", transformers and module("transformers", __version__=transformers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerate().undo()
    assert [part in str(warning.message) for part, warning in zip(said, caught, strict=True)] == [True] * len(said)
    assert {warning.filename for warning in caught} <= {__file__}


@pytest.mark.parametrize(("functions", "options"), [(("chunk_gla",), {}), ((), {"cpu": True})])
def test_without_a_gpu_nothing_more_is_needed(fla, monkeypatch, functions, options):
    monkeypatch.setattr(on_cpu, "REPLACED", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate(*functions, **options).undo()


def test_its_other_name_and_its_log(fla, logged):
    with use_gla_core() as acceleration:
        assert logged == [str(acceleration)]
    assert use_gla_core is accelerate


def test_calls_are_counted_until_all_is_undone(fla):
    q, k, v, g = tokens()
    with accelerate() as acceleration:
        layer, kda = fla["fla.layers.gla"], fla["fla.ops.kda"].chunk_kda
        for _ in range(3):
            layer.chunk_gla(q, k, v, g)
        layer.fused_recurrent_gla(q, k, v, gv=v)
        with accelerate("chunk_gla") as inner:
            layer.chunk_gla(q, k, v, g)
        kda(q, k, v, g, v)
        kda(q, k, v, g, torch.rand(1, 3, 2), cp_context=1)
    layer.chunk_gla(q, k, v, g)
    assert (acceleration.served, inner.served) == ({"chunk_gla": 4}, {"chunk_gla": 1})
    assert acceleration.left == {
        "fused_recurrent_gla": {"gates of values (gv)": 1},
        "chunk_kda": {"a beta for each value": 1, "context parallelism (cp_context)": 1},
    }
    assert inner.left == {}
    assert (
        str(acceleration)
        == """nothing of flash-linear-attention is replaced by this
calls computed here, and left to the original:
- chunk_gla: 4 here
- fused_recurrent_gla: 0 here, 1 left (1: gates of values (gv))
- chunk_kda: 0 here, 2 left (1: a beta for each value; 1: context parallelism
  (cp_context))"""
    )


def test_a_compiled_call_is_counted_when_it_is_traced(fla):
    torch._dynamo.reset()
    q, k, v, g = tokens()
    with accelerate("chunk_gla", "chunk_kda") as acceleration:
        layer, kda = fla["fla.layers.gla"], fla["fla.ops.kda"].chunk_kda

        @torch.compile(fullgraph=True, backend="eager", dynamic=False)
        def run(q):
            return layer.chunk_gla(q, k, v, g)[0], kda(q, k, v, g, q)

        for _ in range(3):
            run(q)
        assert acceleration.served == {"chunk_gla": 1}
        assert acceleration.left == {"chunk_kda": {"a beta for each value": 1}}
        for _ in range(3):
            layer.chunk_gla(q, k, v, g)
        run(q)
        assert acceleration.served == {"chunk_gla": 4}
