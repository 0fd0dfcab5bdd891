"""Retention and Mamba-2 layers beside flash-linear-attention's and transformers' own: `make test-fla`, on a CPU too."""

import inspect
import itertools

import pytest
import torch

from gla_core.compat.fla import accelerate
from gla_core.nn import GLAState, Mamba2, Retention

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
RETENTION = [
    {"num_heads": 4},
    {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "use_output_gate": False},
    {"num_heads": 2, "use_short_conv": True, "conv_bias": True, "fuse_norm": False, "mode": "parallel"},
]
MAMBA2 = [
    {"n_groups": 1, "use_bias": True, "time_step_limit": (0.0, float("inf"))},
    {"n_groups": 2, "use_conv_bias": False, "conv_kernel": 3, "time_step_limit": (0.2, 0.9)},
]


def randomize(layer):
    """Makes every parameter random, so that none can be ignored unnoticed."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def check_values_and_gradients(theirs, ours):
    """Loads the parameters in both directions; compares outputs and all gradients by the names of parameters."""
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert [x.shape for x in theirs.state_dict().values()] == [ours.state_dict()[n].shape for n in theirs.state_dict()]
    x, dy = torch.randn(2, 80, 32, requires_grad=True), torch.randn(2, 80, 32)
    results = []
    for layer, y in ((theirs, theirs(x)), (ours, ours(x)[0])):
        y = y[0] if isinstance(y, tuple) else y
        wanted = [x, *(layer.get_parameter(name) for name, _ in ours.named_parameters())]
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.fixture(params=RETENTION, ids=str)
def retention(request, monkeypatch):
    """Returns FLA's layer, and ours with the same parameters; the rotation, a Triton kernel, is FLA's reference."""
    layers = pytest.importorskip("fla.layers", reason="needs flash-linear-attention 0.6.0: make test-fla")
    from fla.modules.rotary import ops

    def rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, **_):
        rows = list(x.split(1))
        if cu_seqlens is not None:
            rows = [x[:, a:b] for a, b in itertools.pairwise(cu_seqlens.tolist())]
        offsets = torch.as_tensor(seqlen_offsets).expand(len(rows)).tolist()
        at = [slice(first, first + row.shape[1]) for first, row in zip(offsets, rows, strict=True)]
        turned = [ops.rotary_embedding_ref(row, cos[where], sin[where]) for row, where in zip(rows, at, strict=True)]
        return torch.cat(turned, 0 if cu_seqlens is None else 1)

    monkeypatch.setattr(ops, "rotary_embedding", lambda interleaved, chunk_indices, **options: rotary(**options))
    with accelerate(cpu=True):
        theirs = randomize(layers.MultiScaleRetention(hidden_size=32, layer_idx=0, **request.param))
        ours = Retention(32, **request.param)
        ours.load_state_dict(theirs.state_dict())
        yield theirs, ours


def test_retention(retention):
    check_values_and_gradients(*retention)


@torch.no_grad()
def test_retention_packed(retention):
    x, offsets = torch.randn(1, 80, 32), torch.tensor([0, 9, 9, 80])
    theirs, ours = (layer(x, cu_seqlens=offsets)[0] for layer in retention)
    torch.testing.assert_close(theirs, ours, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_retention_decodes(retention, padded):
    """The positions count tokens, and not padding; the layer can continue from the states of FLA's cache."""
    from fla.models.utils import Cache

    theirs, ours = retention
    x, mask = torch.randn(2, 60, 32), torch.ones(2, 60, dtype=torch.long)
    mask[0, :20] = 1 - int(padded)
    y, state = ours(x[:, :58], output_final_state=True, attention_mask=mask[:, :58])
    expected, _, cache = theirs(x[:, :58], mask[:, :58] if padded else None, Cache(), use_cache=True)
    torch.testing.assert_close(y, expected, **CLOSE)
    for t in (58, 59):
        conv = cache[0]["conv_state"]
        conv = conv and tuple(inputs[..., 1:].mT for inputs in conv)
        taken = GLAState(cache[0]["recurrent_state"], conv, mask[:, :t].sum(1))
        torch.testing.assert_close(tuple(taken), tuple(state), **CLOSE)
        y, state = ours.step(x[:, t], taken)  # first, because FLA's layer overwrites its cache
        expected, _, cache = theirs(x[:, t : t + 1], mask[:, : t + 1] if padded else None, cache, use_cache=True)
        torch.testing.assert_close(y[:, None], expected, **CLOSE)


@pytest.fixture(params=MAMBA2, ids=str)
def mamba2(request):
    """Returns the configuration of transformers, its layer, and ours with the same parameters."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2", reason="needs transformers")
    config = modeling.Mamba2Config(
        hidden_size=32, state_size=5, head_dim=8, num_heads=8, num_hidden_layers=1, chunk_size=16, **request.param
    )
    if config.n_groups > 1 and "group_size" not in inspect.signature(modeling.MambaRMSNormGated).parameters:
        pytest.skip("this version of transformers normalizes all groups together")
    theirs = randomize(modeling.Mamba2Mixer(config, 0)).eval()
    ours = Mamba2(
        32,
        config.state_size,
        config.conv_kernel,
        headdim=config.head_dim,
        ngroups=config.n_groups,
        dt_limit=config.time_step_limit,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        norm_eps=config.layer_norm_epsilon,
    )
    ours.load_state_dict(theirs.state_dict())
    return config, theirs, ours


def test_mamba2(mamba2):
    check_values_and_gradients(*mamba2[1:])


@torch.no_grad()
def test_mamba2_with_padding(mamba2):
    _, theirs, ours = mamba2
    for layer in (theirs, ours):
        if layer.in_proj.bias is not None:
            layer.in_proj.bias.zero_()  # transformers' convolution reads the bias of padding
    x, mask = torch.randn(2, 70, 32), torch.ones(2, 70, dtype=torch.long)
    mask[0, :20] = 0
    expected, (y, _) = theirs(x, attention_mask=mask), ours(x, attention_mask=mask)
    torch.testing.assert_close(y[mask.bool()], expected[mask.bool()], **CLOSE)


@torch.no_grad()
def test_mamba2_decodes(mamba2):
    """A state of transformers' cache is taken over; transformers' step does not clamp dt."""
    from transformers.cache_utils import DynamicCache

    config, theirs, ours = mamba2
    x, cache = torch.randn(2, 41, 32), DynamicCache(config=config)
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "cache_params"  # before 5.24
    expected = theirs(x[:, :40], **{name: cache})
    y, state = ours(x[:, :40], output_final_state=True)
    torch.testing.assert_close(y, expected, **CLOSE)
    states = cache.layers[0]
    taken = GLAState(states.recurrent_states[0].mT, (states.conv_states[0][..., 1:].mT,))
    torch.testing.assert_close(tuple(taken), tuple(state), **CLOSE)
    ours.dt_limit = (0.0, float("inf"))
    torch.testing.assert_close(ours.step(x[:, 40], taken)[0][:, None], theirs(x[:, 40:], **{name: cache}), **CLOSE)
