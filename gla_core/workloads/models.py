"""Published models of both families: the call that one layer makes, its sizes, and the source that states them.

A row is a model, the function that its layers call, and sizes as in `inputs`: H key heads (groups of B and C in
Mamba-2), R value heads per key head or G query heads per key head, keys of K (the state) and values of V (the channels
of a head), and M slots. B sequences of T tokens fill a GPU. A decoding step reads one token of each of `SEQUENCES`.

A source is a file of a public repository, or the configuration on a model's page. A model is not here if no public
source states its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gla_core.workloads.rows import sizes_of

SEQUENCES = 64
"""The number of sequences in a decoding step."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that layers call.

    Attributes:
        peer: the library whose function it is, `fla` or `mamba_ssm`.
        module: the module of that library that has the function. step_module: the one that has the step.
        step: the function that decodes one token.
        inputs: the shape of each input, in order. states: the shapes of the states that a step reads and writes.
        gate_form: form of the gates in the call of GLA, or of a delta rule, that computes it, one of
            `inputs.gla_inputs`; "none" without gates.
    """

    peer: str
    module: str
    step: str
    inputs: Mapping[str, str] = field(hash=False)
    states: tuple[str, ...] = ("B Hv K V",)
    gate_form: str = "key"
    step_module: str = ""

    @property
    def is_delta_rule(self) -> bool:
        return "beta" in self.inputs


_QKV = {"q": "B T Hq K", "k": "B T H K", "v": "B T Hv V"}
_SUM = "B 1 H K"  # of the keys, or the logarithm of the sum of their exponentials
_SCAN_INPUTS = {"x": "B T Hv V", "dt": "B T Hv", "A": "Hv", "B": "B T H K", "C": "B T H K", "D": "Hv", "dt_bias": "Hv"}
# fmt: off
FUNCTIONS: Mapping[str, Function] = {
    "mamba_chunk_scan_combined": Function(
        "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "selective_state_update", _SCAN_INPUTS, ("B Hv V K",), "head",
        "mamba_ssm.ops.triton.selective_state_update"),
    "chunk_gla": Function("fla", "fla.ops.gla", "fused_recurrent_gla", {**_QKV, "g": "B T H K"}),
    "chunk_simple_gla": Function(
        "fla", "fla.ops.simple_gla", "fused_recurrent_simple_gla", {**_QKV, "g": "B T H"}, gate_form="head"),
    "chunk_simple_gla, g_gamma": Function(
        "fla", "fla.ops.simple_gla", "fused_recurrent_simple_gla", {**_QKV, "g_gamma": "H"}, gate_form="constant"),
    "chunk_retention": Function(
        "fla", "fla.ops.retention", "fused_recurrent_retention", _QKV, gate_form="constant"),
    "chunk_linear_attn": Function(
        "fla", "fla.ops.linear_attn", "fused_recurrent_linear_attn", _QKV, ("B H K V", _SUM), "none"),
    "chunk_rwkv6": Function(
        "fla", "fla.ops.rwkv6", "fused_recurrent_rwkv6",
        {"r": "B T H K", "k": "B T H K", "v": "B T H V", "w": "B T H K", "u": "H K"}),
    "chunk_lightnet": Function("fla", "fla.ops.lightnet", "fused_recurrent_lightnet", _QKV, ("B H K V", _SUM)),
    "chunk_gsa": Function(
        "fla", "fla.ops.gsa", "fused_recurrent_gsa", {**_QKV, "s": "B T H M", "g": "B T H M"}, ("B H K M", "B H M V")),
    "chunk_kda": Function(
        "fla", "fla.ops.kda", "fused_recurrent_kda", {**_QKV, "g": "B T Hv K", "beta": "B T Hv"}),
    "chunk_gated_delta_rule": Function(
        "fla", "fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule",
        {**_QKV, "g": "B T Hv", "beta": "B T Hv"}, gate_form="head"),
    "chunk_delta_rule": Function(
        "fla", "fla.ops.delta_rule", "fused_recurrent_delta_rule", {**_QKV, "beta": "B T Hv"}, gate_form="none"),
}
"""The functions by name. What follows a comma says which of its arguments are used."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, the function that its layers call (a key of `FUNCTIONS`), the sizes of a call, and their source."""

    name: str
    function: str
    sizes: Mapping[str, int] = field(hash=False)
    source: str

    @property
    def dims(self) -> dict[str, int]:
        """Returns all sizes, with the numbers of value heads Hv and of query heads Hq."""
        H = self.sizes["H"]
        return {"R": 1, "G": 1, **self.sizes, "Hv": H * self.sizes.get("R", 1), "Hq": H * self.sizes.get("G", 1)}

    def resized(self, **sizes: int) -> Model:
        """Returns the same model with other sizes of the call."""
        return dataclasses.replace(self, sizes={**self.sizes, **sizes})


def _models(function: str, source: str, *rows: tuple[str, str] | tuple[str, str, str]) -> tuple[Model, ...]:
    """Returns models that call a function: name, sizes, and what completes the source."""
    return tuple(Model(name, function, sizes_of(dims), source.format(*more)) for name, dims, *more in rows)


SCAN = "mamba_chunk_scan_combined"
_MEGATRON = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/models/nemotronh/nemotron_h_provider.py, {}"
_FALCON = "huggingface/transformers: docs/source/en/model_doc/falcon_h1.md; groups: the model's config.json"
_DEFAULTS = "huggingface/transformers: src/transformers/models/{0}/configuration_{0}.py (its defaults)"
_FLA_DEFAULTS = "fla-org/flash-linear-attention: fla/models/{0}/configuration_{0}.py (its defaults)"
MODELS: tuple[Model, ...] = (
    *_models(
        SCAN,
        "state-spaces/mamba: README.md (d_model), mamba_ssm/modules/mamba2.py (the other sizes)",
        ("Mamba-2 130m", "B8 T2048 H1 R24 K128 V64"),
        ("Mamba-2 370m", "B8 T2048 H1 R32 K128 V64"),
        ("Mamba-2 780m", "B4 T4096 H1 R48 K128 V64"),
        ("Mamba-2 1.3b", "B4 T4096 H1 R64 K128 V64"),
        ("Mamba-2 2.7b", "B4 T4096 H1 R80 K128 V64"),
    ),
    *_models(
        SCAN,
        "huggingface/transformers: src/transformers/models/mamba2/configuration_mamba2.py (its defaults)",
        ("Codestral Mamba 7B", "B2 T8192 H8 R16 K128 V64"),
    ),
    *_models(
        SCAN,
        _MEGATRON,
        ("Nemotron-H 4B", "B2 T8192 H8 R14 K128 V64", "NemotronHModelProvider4B"),
        ("Nemotron-H 8B", "B2 T8192 H8 R16 K128 V64", "NemotronHModelProvider8B"),
        ("Nemotron-H 47B", "B2 T8192 H8 R32 K256 V64", "NemotronHModelProvider47B"),
        ("Nemotron-H 56B", "B2 T8192 H8 R32 K256 V64", "NemotronHModelProvider56B"),
        ("Nemotron Nano 9B v2", "B2 T8192 H8 R16 K128 V80", "NemotronNanoModelProvider9Bv2"),
        ("Nemotron Nano 12B v2", "B2 T8192 H8 R16 K128 V80", "NemotronNanoModelProvider12Bv2"),
        ("Nemotron-3 Nano 30B", "B2 T8192 H8 R8 K128 V64", "Nemotron3NanoProvider"),
        ("Nemotron-3 Super 120B", "B2 T8192 H8 R16 K128 V64", "Nemotron3SuperProvider"),
    ),
    *_models(
        SCAN,
        "{}",
        ("Granite-4 tiny", "B4 T4096 H1 R48 K128 V64", "ibm-granite/granite-4.0-h-tiny: its metadata on ollama.com"),
        ("Granite-4 micro", "B4 T4096 H1 R64 K128 V64",
         "ibm-granite/granite-4.0-h-micro: config.json, as in anuj6316/granite"),
        ("Granite-4 small", "B1 T32768 H1 R128 K128 V64",
         "ibm-granite/granite-4.0-h-small: its metadata on ollama.com"),
        ("Bamba 9B", "B4 T4096 H1 R128 K128 V64",
         "foundation-model-stack/fms-fsdp: fms_fsdp/utils/config_utils.py, mamba_9.8b (d_model); "
         "state-spaces/mamba: mamba_ssm/modules/mamba2.py (the other sizes)"),
        ("Zamba2 1.2B", "B4 T4096 H1 R64 K128 V64", "Zyphra/Zamba2-1.2B: config.json"),
        ("Zamba2 2.7B", "B4 T4096 H1 R80 K64 V64", "Zyphra/Zamba2: config.json, mamba_config.py"),
        ("Zamba2 7B", "B2 T4096 H2 R56 K64 V64",
         "Zyphra/Zamba2-7B: config.json, as in adamo1139/Zamba2-7B-ungated"),
        ("Falcon-H1 0.5B", "B8 T2048 H1 R24 K128 V64", _FALCON),
        ("Falcon-H1 1.5B", "B4 T4096 H1 R48 K256 V64", _FALCON),
        ("Falcon-H1 3B", "B4 T4096 H1 R32 K256 V128", _FALCON),
        ("Falcon-H1 7B", "B4 T4096 H1 R24 K256 V128", _FALCON),
        ("Falcon-H1 34B", "B2 T4096 H2 R16 K256 V128", _FALCON),
        ("Plamo-2 1B", "B4 T4096 H1 R32 K64 V128", "pfnet/plamo-2-1b: config.json, as in mlx-community/plamo-2-1b"),
    ),
    *_models(
        "chunk_simple_gla, g_gamma",
        "{}",
        ("Ling-2.5 1T", "B2 T8192 H64 K128 V128", "inclusionAI/Ring-2.5-1T: config.json, as in tiny-random/ring-2.5"),
        ("Ling-2.6 flash", "B4 T4096 H32 K128 V128", "inclusionAI/Ling-2.6-flash-fp8: config.json"),
        ("MiniMax-01", "B2 T8192 H64 K128 V128", "MiniMax-AI/MiniMax-01: MiniMax-Text-01-Model-Card.md"),
        ("MiniCPM-SALA", "B4 T4096 H32 K128 V128", "openbmb/MiniCPM-SALA: config.json, as in ZJJ1677/MiniCPM-SALA"),
    ),
    *_models(
        "chunk_retention",
        "{}",
        ("RetNet 1.3B", "B4 T4096 H8 K256 V512", "fla-hub/retnet-1.3B-100B: config.json"),
        ("RetNet 3B", "B4 T4096 H10 K256 V428", "microsoft/torchscale: examples/fairseq/models/retnet.py, retnet_3b"),
        ("RetNet 7B", "B4 T4096 H16 K256 V432", "microsoft/torchscale: examples/fairseq/models/retnet.py, retnet_7b"),
    ),
    *_models(
        "chunk_gla",
        "{}",
        ("GLA 340M", "B8 T2048 H4 K128 V256",
         "sustcsonglin/flash-linear-attention: training/configs/gla_340M.json, as in zaydzuhri/gla-16M-test"),
        ("GLA 1.3B", "B4 T4096 H4 K256 V512", "fla-hub/gla-1.3B-100B: config.json"),
        ("GLA 2.7B", "B4 T4096 H5 K256 V512", "fla-hub/gla-2.7B-100B: config.json"),
        ("GLA 2.7B of 4 heads", "B2 T4096 H4 K320 V640",
         "fla-org/flash-linear-attention: fla/models/gla/configuration_gla.py (its defaults), hidden size 2560"),
        ("GLA 7B", "B4 T4096 H8 G4 K128 V128", "sustcsonglin/flash-linear-attention: training/configs/gla_7B.json"),
        ("HGRN2 1.3B", "B4 T4096 H16 K128 V128",
         "fla-org/flash-linear-attention: fla/models/hgrn2/configuration_hgrn2.py (its defaults)"),
    ),
    *_models(
        "chunk_gsa",
        "fla-hub/{}: config.json",
        ("GSA 2.7B", "B4 T4096 H5 K512 V512 M64", "gsa-2.7B-100B"),
        ("GSA 7B", "B4 T4096 H8 G4 K128 V128 M64", "gsa-7B-mistral-100B"),
    ),
    *_models(
        "chunk_rwkv6",
        "{}",
        ("RWKV-6 3B", "B4 T4096 H40 K64 V64", "RWKV/v6-Finch-3B-HF: config.json (head_size, attention_hidden_size)"),
        ("RWKV-6 7B", "B4 T4096 H64 K64 V64", "fla-hub/rwkv6-7B-finch: config.json"),
    ),
    *_models(
        "chunk_linear_attn",
        "HazyResearch/based: train/configs/experiment/reference/{}.yaml; fla/modules/feature_map.py makes 153 "
        "features of 16",
        ("Based 360M", "B8 T2048 H16 K153 V64", "based-360m"),
        ("Based 1B", "B4 T4096 H16 K153 V112", "based-1b"),
    ),
    *_models(
        "chunk_simple_gla",
        "fla-org/flash-linear-attention: fla/layers/simple_gla.py (its defaults), hidden size 2048",
        ("simple GLA 1.3B", "B4 T4096 H4 K512 V512"),
    ),
    *_models(
        "chunk_lightnet",
        "fla-org/flash-linear-attention: fla/models/lightnet/configuration_lightnet.py (its defaults)",
        ("LightNet 1.3B", "B4 T4096 H16 K128 V128"),
    ),
    *_models(
        "chunk_gated_delta_rule",
        "{}",
        ("Qwen3-Next 80B", "B4 T4096 H16 R2 K128 V128", _DEFAULTS.format("qwen3_next")),
        ("Qwen3.5 0.8B", "B8 T2048 H16 K128 V128", "Qwen/Qwen3.5-0.8B: config.json"),
        ("Qwen3.5 2B", "B8 T2048 H16 K128 V128", "Qwen/Qwen3.5-2B: config.json"),
        ("Qwen3.5 4B", "B4 T4096 H16 R2 K128 V128", "Qwen/Qwen3.5-4B: config.json"),
        ("Qwen3.5 9B", "B4 T4096 H16 R2 K128 V128", "Qwen/Qwen3.5-9B: config.json"),
        ("Qwen3.5 27B", "B2 T8192 H16 R3 K128 V128", "Qwen/Qwen3.5-27B: config.json"),
        ("Qwen3.5 35B", "B4 T4096 H16 R2 K128 V128", "Qwen/Qwen3.5-35B-A3B: config.json"),
        ("Qwen3.5 122B", "B2 T8192 H16 R4 K128 V128", "Qwen/Qwen3.5-122B-A10B: config.json"),
        ("Qwen3.5 397B", "B2 T8192 H16 R4 K128 V128", "Qwen/Qwen3.5-397B-A17B: config.json"),
        ("Qwen3.6 27B", "B2 T8192 H16 R3 K128 V128", "Qwen/Qwen3.6-27B: config.json"),
        ("Qwen3.6 35B", "B4 T4096 H16 R2 K128 V128", "Qwen/Qwen3.6-35B-A3B: config.json"),
        ("Qwen3.8 27B", "B2 T8192 H16 R3 K128 V128", "Qwen/Qwen3.8-27B: config.json"),
        ("OLMo-Hybrid 7B", "B4 T4096 H30 K96 V192", _DEFAULTS.format("olmo_hybrid")),
        ("Gated DeltaNet 1.3B", "B4 T4096 H6 K256 V512", _FLA_DEFAULTS.format("gated_deltanet")),
    ),
    *_models(
        "chunk_kda",
        "{}",
        ("Kimi-Linear 48B", "B4 T4096 H32 K128 V128", _DEFAULTS.format("kimi_linear")),
        ("Kimi K3", "B2 T8192 H96 K128 V128",
         "NVIDIA-NeMo/Megatron-Bridge: examples/model_verification_cards/kimi-k3/card.yaml"),
        ("GLM-5.3-Flash", "B2 T8192 H64 K128 V128", _DEFAULTS.format("glm5_next")),
        ("Ling V3", "B4 T4096 H32 K128 V128", _DEFAULTS.format("bailing_hybrid")),
    ),
    *_models(
        "chunk_delta_rule",
        _FLA_DEFAULTS,
        ("DeltaNet 1.3B", "B4 T4096 H16 K128 V128", "delta_net"),
    ),
)
# fmt: on


def distinct(models: Iterable[Model] = MODELS) -> tuple[Model, ...]:
    """Returns the models without repeated calls. Models that make the same call become one, with all their names."""
    calls: dict[tuple[str, tuple[tuple[str, int], ...]], list[Model]] = {}
    for model in models:
        calls.setdefault((model.function, tuple(model.sizes.items())), []).append(model)
    return tuple(dataclasses.replace(same[0], name=", ".join(model.name for model in same)) for same in calls.values())


def reduced(model: Model, T: int = 64) -> Model:
    """Returns a model at sizes for a CPU: narrower, with fewer heads and sequences, of the same form."""
    least = {"B": 2, "T": T, "H": 2, "R": 3, "G": 2, "K": 24, "V": 16, "M": 8}
    return model.resized(**{name: min(size, least[name]) for name, size in model.sizes.items()})
