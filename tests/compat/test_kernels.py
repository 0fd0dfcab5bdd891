"""transformers' own way to other kernels, `use_kernels=True`, against `accelerate()`: `make test-fla`, on a CPU."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-fla")
if not transformers.utils.is_kernels_available():
    pytest.skip(
        "needs a version of the package kernels that suits transformers: make test-fla", allow_module_level=True
    )

import kernels
from transformers.utils import kernel_config as configurations

from gla_core.compat.mamba_ssm import kernels as plugin
from gla_core.compat.transformers import accelerate, layers
from tests.compat.test_with_transformers import CLOSE, model_of, tokens_of

NAMES = {"mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"}
NAMES |= {"causal_conv1d_fn", "causal_conv1d_update"}
NAMES |= {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(plugin, "provided", None)


@pytest.fixture(params=["Mamba2", "Qwen3Next", "KimiLinear"])
def model(request):
    """A model; afterwards transformers' functions, which all models share, are the original ones again."""
    model = model_of(request.param)
    yield model
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")


@torch.no_grad()
def results(model):
    tokens = tokens_of(length=20)
    return model(tokens).logits, model.generate(tokens, max_new_tokens=4, do_sample=False)


def check(model, calls, expected):
    calls.update(scan=0, step=0)
    logits, tokens = results(model)
    computed = sum(hasattr(module, "A_log") for module in model.modules())
    assert calls == {"scan": 2 * computed, "step": 3 * computed}
    torch.testing.assert_close(logits, expected[0], rtol=CLOSE, atol=CLOSE)
    assert torch.equal(tokens, expected[1])


def test_the_names_of_kernels():
    assert layers.LAYERS.keys() == NAMES


def test_a_mapping_of_kernels(model, calls, tmp_path):
    """A mapping of `kernels` itself, for a device that transformers' KernelConfig does not know."""
    with accelerate():
        expected = results(model)
    mapping = {name: {"cpu": kernels.LocalLayerRepository(layers.FOLDER, layer_name=name)} for name in layers.LAYERS}
    model.save_pretrained(tmp_path)
    with kernels.use_kernel_mapping(mapping):
        loaded = type(model).from_pretrained(tmp_path, use_kernels=True)
    check(loaded, calls, expected)


@pytest.fixture
def cpu_is_known(monkeypatch):
    """Has transformers' KernelConfig take a CPU: it takes the devices for which the hub has kernels."""
    supported = [*configurations.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    monkeypatch.setattr(configurations, "KERNELS_SUPPORTED_DEVICE_TYPES", supported)


def test_a_configuration(model, calls, cpu_is_known):
    with accelerate():
        expected = results(model)
    assert calls["scan"]
    assert calls["step"]
    model.set_use_kernels(True, layers.kernel_config(model))
    check(model, calls, expected)


@pytest.mark.parametrize("model", ["Mamba2"], indirect=True)
def test_gradients(model, calls, cpu_is_known):
    """A step that records gradients is left to transformers."""
    model, tokens = model.train(), tokens_of(length=20)

    def computed():
        prompt = model(tokens[:, :-1], use_cache=True)
        gradients = torch.autograd.grad(prompt.logits.square().mean(), list(model.parameters()))
        return *gradients, model(tokens[:, -1:], cache_params=prompt.cache_params, use_cache=True).logits

    expected = computed()
    model.set_use_kernels(True, layers.kernel_config(model))
    torch.testing.assert_close(computed(), expected, rtol=1e-4, atol=1e-5)
    assert calls == {"scan": 2, "step": 0}


def test_a_function_that_accelerate_replaced():
    with accelerate("mamba2"):
        assert layers._layers().keys() == NAMES
