"""Replacing functions of transformers, in fake modules with its structure."""

import sys
import types

import pytest
import torch

from gla_core.compat.mamba_ssm import kernels
from gla_core.compat.replace import OTHER_CALLS
from gla_core.compat.transformers import accelerate
from gla_core.compat.transformers.accelerate import MODELS, NO_KERNELS, NOTE
from gla_core.compat.transformers.delta import GATED_DELTA_RULE, KIMI_DELTA_ATTENTION
from gla_core.compat.transformers.mamba2 import MAMBA2
from gla_core.compat.transformers.one_token import blocks, layers

PRESENT = ("bamba", "mamba2", "qwen3_5", "kimi_linear")
PATHS = {model: f"transformers.models.{model}.modeling_{model}" for model in MODELS}
SCAN, STEP, SPLIT, CONVOLUTION, UPDATE = MAMBA2.functions
RULES = {"qwen3_5": list(GATED_DELTA_RULE.functions)[:2], "kimi_linear": list(KIMI_DELTA_ATTENTION.functions)[:2]}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """There are no kernels, even if another test has imported a plugin that provides them."""
    monkeypatch.setattr(kernels, "provided", None)


@pytest.fixture
def fakes(monkeypatch):
    """Fake modules of transformers with four of the models; their functions return their name and their arguments."""

    def original(name):
        return lambda *args, **kwargs: (name, args, kwargs)

    library = types.ModuleType("transformers")
    vars(library)["__version__"] = "5.0"
    monkeypatch.setitem(sys.modules, "transformers", library)
    modules = {}
    for model, path in PATHS.items():
        module = types.ModuleType(path)
        vars(module).update({name: original(name) for name in MODELS[model].functions})
        monkeypatch.setitem(sys.modules, path, module if model in PRESENT else None)
        modules[model] = module
    return modules


def originals(fakes):
    return {model: dict(vars(module)) for model, module in fakes.items()}


def tokens(batch=2, T=3, heads=4, groups=2, P=5, N=6):
    """Returns the arguments of a scan."""
    x, B, C = torch.randn(batch, T, heads, P), torch.randn(batch, T, groups, N), torch.randn(batch, T, groups, N)
    return x, torch.rand(batch, T, heads), -torch.rand(heads), B, C, 4


def one_token(requires_grad=False):
    """Returns the arguments of a step, the state first."""
    x, dt, A, B, C, _ = tokens(T=1)
    state = torch.zeros(2, 4, 5, 6)
    return (
        state,
        x[:, 0].requires_grad_(requires_grad),
        dt.mT.expand(-1, -1, 5),
        A[:, None, None].expand(4, 5, 6),
        B[:, 0],
        C[:, 0],
    )


def places(*models):
    """Returns the names of the functions of models, and for each the modules of the models that have it."""
    names = dict.fromkeys(name for model in models for name in MODELS[model].functions)
    return {name: tuple(PATHS[model] for model in models if name in MODELS[model].functions) for name in names}


def test_all_models_that_exist(fakes):
    before = originals(fakes)
    acceleration = accelerate()
    assert acceleration.replaced == places(*PRESENT)
    for model in ("bamba", "mamba2"):
        out, state = fakes[model].mamba2_chunk_scan(*tokens(), return_final_states=True)
        assert (out.shape, state.shape) == ((2, 3, 4, 5), (2, 4, 5, 6))
        assert fakes[model].mamba2_selective_state_update(*one_token()).shape == (2, 4, 5)
        assert fakes[model].mamba2_split_conv1d_scan_combined(torch.zeros(2, 3, 8), dt_limit=(0.0, 1.0)) is None
    for model in PRESENT:
        assert fakes[model].causal_conv1d_fn(1, 2)[0] == CONVOLUTION
    for model, (chunk, recurrent) in RULES.items():
        x, g, beta = torch.randn(2, 3, 4, 5), -torch.rand(2, 3, 4), torch.rand(2, 3, 4)
        o, state = getattr(fakes[model], chunk)(x, x, x, g=g, beta=beta, output_final_state=True)
        assert (o.shape, state.shape) == ((2, 3, 4, 5), (2, 4, 5, 5))
        assert getattr(fakes[model], recurrent)(x, x, x, g=g, beta=beta, initial_state=state)[1] is None
    assert str(acceleration).replace("\n  ", " ").splitlines() == [
        "4 modules of transformers now call gla_core; see `replaced`:",
        "- computed by gla_core: mamba2_chunk_scan, mamba2_selective_state_update",
        "- left out for mamba2_chunk_scan: mamba2_split_conv1d_scan_combined",
        "- computed on a GPU by a kernel of gla_transformers, if it is imported: causal_conv1d_fn, "
        "causal_conv1d_update",
        "- computed by gla_core on a CPU, and on Hopper in bfloat16 with K and V from 33 to 128 (wider without a gate "
        "for each key), but for packed sequences without cu_seqlens: torch_chunk_gated_delta_rule, "
        "torch_recurrent_gated_delta_rule, chunk_kimi_delta_attention, recurrent_kimi_delta_attention",
        f"- {NO_KERNELS}",
        "calls computed here, and left to the original:",
        "- mamba2_chunk_scan: 2 here",
        "- mamba2_selective_state_update: 2 here",
        "- mamba2_split_conv1d_scan_combined: 2 here",
        "- causal_conv1d_fn: 0 here, 4 left (4: gla_transformers is not imported)",
        *(f"- {name}: 1 here" for names in RULES.values() for name in names),
    ]
    acceleration.undo()
    assert originals(fakes) == before
    assert str(acceleration).splitlines()[0] == "nothing of transformers is replaced by this"


def test_several_in_force(fakes):
    before = originals(fakes)
    first = accelerate("mamba2")
    assert vars(fakes["bamba"]) == before["bamba"]
    second = accelerate()
    assert second.replaced == places("bamba", "qwen3_5", "kimi_linear")
    first.undo()
    first.undo()
    kept = fakes["mamba2"].mamba2_chunk_scan
    assert kept(*tokens()).shape == (2, 3, 4, 5)
    second.undo()
    assert originals(fakes) == before
    assert kept(1) == (SCAN, (1,), {})


class Provided:
    """Kernels that return their name, or None for tensors of more than one element."""

    def convolve_token(self, x, *_):
        return "convolve_token" if x.numel() == 1 else None

    def convolve_sequences(self, x, *_):
        return "convolve_sequences" if x.numel() == 1 else None

    def norm(self, x, weight, gate, eps, groups, gate_first):
        return ("norm", eps, groups, gate_first) if x.numel() == 1 else None


def test_kernels_of_a_plugin(fakes, monkeypatch):
    """They compute what they take, while the replacement is in force; otherwise the original does."""
    module, one, two = fakes["mamba2"], torch.zeros(1, 1, 1), torch.zeros(2, 1, 1)

    class Mamba2RMSNorm:
        weight, variance_epsilon, n_groups, norm_before_gate = None, 0.5, 3, True

        def forward(self, x, gate=None):
            return "original"

    class Other(Mamba2RMSNorm):
        pass

    Mamba2RMSNorm.__module__ = Other.__module__ = module.__name__
    vars(module).update(norm=Mamba2RMSNorm, other=Other)
    layer, original = Mamba2RMSNorm(), Mamba2RMSNorm.forward
    with accelerate("mamba2") as acceleration:
        assert acceleration.replaced["Mamba2RMSNorm.forward"] == (module.__name__,)
        held = layer.forward
        assert (held(one), module.causal_conv1d_update(one, 0, 0)[0]) == ("original", UPDATE)
        monkeypatch.setattr(kernels, "provided", Provided())
        assert layer.forward(one) == layer.forward(one, gate=one) == held(one) == ("norm", 0.5, 3, False)
        assert module.causal_conv1d_update(one, 0, 0) == "convolve_token"
        assert module.causal_conv1d_fn(one, 0) == "convolve_sequences"
        assert (layer.forward(two), module.causal_conv1d_update(two, 0, 0)[0]) == ("original", UPDATE)
        assert module.causal_conv1d_fn(two, 0)[0] == module.causal_conv1d_fn(one, 0, seq_idx=one)[0] == CONVOLUTION
        with accelerate() as inner:
            assert "Mamba2RMSNorm.forward" not in inner.replaced
            assert str(inner).endswith(NOTE)
        assert layer.forward(one)[0] == "norm"
    assert Mamba2RMSNorm.forward is original
    assert held(one) == "original"
    assert acceleration.served["Mamba2RMSNorm.forward"] == 4
    assert acceleration.left["Mamba2RMSNorm.forward"] == {OTHER_CALLS: 2}


def test_layers_with_unknown_names_keep_their_forward(fakes):
    class Known:
        def forward(self, x):
            return self.A_log.float()

    class Unknown:
        def forward(self, x):
            return self.A_log.float() * self.multiplier

    module = fakes["mamba2"]
    Known.__module__ = Unknown.__module__ = module.__name__
    vars(module).update(known=Known, unknown=Unknown)
    assert layers(module) == [Known]


def test_blocks_with_unknown_names_keep_their_forward(fakes):
    class Known:
        def forward(self, x):
            return x + self.mixer(self.norm(x))

    class Scaled:
        def forward(self, x):
            return x + self.scale * self.mixer(self.norm(x))

    class WithoutMixer:
        def forward(self, x):
            return x + self.norm(x)

    module = fakes["mamba2"]
    for block in (Known, Scaled, WithoutMixer):
        block.__module__ = module.__name__
        setattr(module, block.__name__, block)
    assert blocks(module) == [Known]
    original = Known.forward
    with accelerate() as acceleration:
        assert acceleration.replaced["Known.forward"] == (module.__name__,)
        assert blocks(module) == [Known]
    assert Known.forward is original


def test_after_an_error_all_is_as_before(fakes):
    before = originals(fakes)
    with pytest.raises(RuntimeError, match="mine"), accelerate():
        raise RuntimeError("mine")
    assert originals(fakes) == before


@pytest.mark.parametrize("name", [SCAN, SPLIT])
@pytest.mark.parametrize("options", [{"cu_seqlens": torch.tensor([0, 3])}, {"dt_limit": (-1.0, 1.0)}], ids=str)
def test_scans_that_are_left_to_the_original(fakes, name, options):
    with accelerate():
        function, arguments = getattr(fakes["mamba2"], name), tokens(batch=1)
        assert function(*arguments, **options) == (name, arguments, options)
        both = function(*arguments, cu_seqlens=torch.tensor([0, 3]), seq_idx=torch.zeros(1, 3, dtype=torch.int32))
        assert both is None if name == SPLIT else both.shape == (1, 3, 4, 5)


def test_steps_that_are_left_to_the_original(fakes):
    with accelerate() as acceleration:
        step = fakes["mamba2"].mamba2_selective_state_update
        assert step(*one_token(requires_grad=True))[0] == STEP
        assert step(*one_token(), dt_bias=torch.zeros(4, 5, requires_grad=True))[0] == STEP
        assert step(*one_token(), seq_idx=torch.zeros(2, 1))[0] == STEP
        assert step(*one_token(), cu_seqlens=torch.tensor([0, 1]))[0] == STEP
        with torch.no_grad():
            assert step(*one_token(requires_grad=True)).shape == (2, 4, 5)
    assert acceleration.left == {STEP: {"gradients are recorded": 2, "packed sequences": 2}}


def test_every_argument_has_an_effect(fakes):
    """Arguments are passed by the names that transformers gives them; those of other functions are ignored."""
    options = {
        "D": torch.randn(4),
        "dt_bias": torch.randn(4),
        "initial_states": torch.randn(2, 4, 5, 6),
        "dt_softplus": True,
        "dt_limit": (0.2, 0.5),
        "z": torch.randn(2, 3, 4, 5),
        "seq_idx": torch.tensor([[0, 0, 1], [0, 1, 1]]),
    }
    arguments = tokens()
    with accelerate():
        scan = fakes["mamba2"].mamba2_chunk_scan
        with_all = scan(*arguments, **options, return_final_states=False, position_ids=None)
        for name in options:
            others = {k: v for k, v in options.items() if k != name}
            assert not torch.allclose(scan(*arguments, **others), with_all), name


def test_every_argument_of_a_step_has_an_effect(fakes):
    options = {
        "D": torch.randn(4, 5),
        "dt_bias": torch.randn(4, 1).expand(4, 5),
        "dt_softplus": True,
        "z": torch.randn(2, 4, 5),
    }
    state, *arguments = one_token()
    with accelerate():
        step = fakes["mamba2"].mamba2_selective_state_update
        with_all = step(state, *arguments, **options, position_ids=None)
        assert state.abs().sum() > 0
        for name in options:
            rest = {k: v for k, v in options.items() if k != name}
            assert not torch.allclose(step(torch.zeros_like(state), *arguments, **rest), with_all), name


def test_a_name_that_is_not_known(fakes):
    message = r"unknown model 'mamba3'; did you mean 'mamba2'\? \(there are bamba, falcon_h1,"
    with pytest.raises(ValueError, match=message):
        accelerate("mamba3")


def test_models_that_the_installed_version_does_not_have(fakes):
    before = originals(fakes)
    message = r"transformers 5.0 has no mamba2_chunk_scan or .* for zamba2; install transformers 5"
    with pytest.raises(ImportError, match=message):
        accelerate("mamba2", "zamba2")
    assert originals(fakes) == before
    with pytest.raises(ImportError, match=r"no torch_chunk_gated_delta_rule or .* for lara_mini; install .* 5\.24 or"):
        accelerate("lara_mini", "qwen3_5")
    for model in PRESENT:
        del vars(fakes[model])[RULES[model][1] if model in RULES else STEP]
    message = r"for bamba, falcon_h1, granitemoehybrid, mamba2, nemotron_h, zamba2, .*kimi_linear; install .* 5\.16 or"
    with pytest.raises(ImportError, match=message):
        accelerate()


def test_a_model_that_needs_another_package(fakes, monkeypatch, tmp_path):
    (tmp_path / "modeling_mamba2.py").write_text("import a_package_that_is_missing")
    package = types.ModuleType("transformers.models.mamba2")
    package.__path__ = [str(tmp_path)]
    for path in ("transformers.models", package.__name__):
        monkeypatch.setitem(sys.modules, path, package)
    monkeypatch.delitem(sys.modules, PATHS["mamba2"])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        accelerate()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="cannot import transformers; install it: pip install transformers"):
        accelerate()
