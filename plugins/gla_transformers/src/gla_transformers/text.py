"""Text generation with the model and the tokenizer of a folder, for `gla generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, TextStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from gla_core.compat.transformers import MODELS as ACCELERATED
from gla_core.compat.transformers import accelerate
from gla_transformers.configuration import GLAConfig, HGRN2Config
from gla_transformers.modeling import GLAForCausalLM, HGRN2ForCausalLM

MODELS: dict[str | None, type[GLAForCausalLM]] = {
    GLAConfig.model_type: GLAForCausalLM,
    HGRN2Config.model_type: HGRN2ForCausalLM,
}
"""The models of this package, by the type that a configuration says; others are those that `accelerate` serves."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    A temperature of 0 means that the likeliest token is always taken. dtype None means the dtype of the weights.
    """

    folder: Path
    prompt: str
    device: torch.device
    max_new_tokens: int = 100
    temperature: float = 0.7
    seed: int = 0
    dtype: torch.dtype | None = None


def run_generate(options: Options) -> None:
    """Prints the prompt and the model's continuation, a word at a time, and then tokens a second to standard error.

    Raises:
        ValueError: the folder has none of these models, lacks weights or a tokenizer, a file cannot be read, or the
            prompt has no tokens.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    model, tokenizer = _model(options), _tokenizer(options.folder)
    tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    if tokens.shape[1] == 0:
        raise ValueError("the prompt has no tokens; pass some text as --prompt")
    if tokens.max() >= (number := model.get_input_embeddings().num_embeddings):
        raise ValueError(
            f"the prompt has token {tokens.max()} of a model with {number}; "
            "expected the tokenizer that the model was trained with"
        )
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    printed = _Printed(tokenizer, skip_special_tokens=True)
    how = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": options.max_new_tokens, "streamer": printed}
    model.generate(tokens, **how, **sampling)
    print(speed(tokens.shape[1], printed.times), file=sys.stderr)


def speed(prompt: int, times: Sequence[float]) -> str:
    """Returns tokens a second for the prompt and for decoding.

    Args:
        prompt: number of tokens of the prompt.
        times: when it was given, and when each new token was there. The first one comes with the prompt.
    """
    parts = {"prompt": (prompt, times[:2]), "decoding": (len(times) - 2, times[1:])}
    return ", ".join(
        f"{part}: {number} tokens, {number / max(seconds[-1] - seconds[0], 1e-9):.0f} tokens/s"
        for part, (number, seconds) in parts.items()
        if number > 0
    )


class _Printed(TextStreamer):
    """Prints text as it is decoded, with question marks for characters that standard output cannot encode.

    Attributes:
        times: when the prompt was given, and when each token came.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Receives the prompt, and then each token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        super().on_finalized_text(text.encode(encoding, "replace").decode(encoding), stream_end)


def _model(options: Options) -> Any:
    folder = options.folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; expected a folder that save_pretrained has written")
    kind = _read(folder, "configuration", lambda: GLAConfig.get_config_dict(folder)[0].get("model_type"))
    made = _class_of(kind)
    if made is None:
        known = ", ".join(map(repr, [*MODELS, *ACCELERATED]))
        raise ValueError(f"{folder} has a model of type {kind!r}; expected one of {known}")
    how: dict[str, Any] = {"dtype": options.dtype or "auto", "local_files_only": True}
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are refused below, by name
    model, report = _read(folder, "model", lambda: made.from_pretrained(folder, **how))
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks the weights {', '.join(sorted(report['missing_keys']))}")
    if report["mismatched_keys"]:
        name, actual, expected = min(report["mismatched_keys"])
        raise ValueError(f"{folder} has {name} {list(actual)}; expected {list(expected)}, as its config.json says")
    return model.to(options.device).eval()


def _class_of(kind: str | None) -> Any:
    """Returns the class that reads models of a type, whose layers then compute here; None if there is none."""
    if kind in MODELS:
        return MODELS[kind]
    family = (kind or "").removesuffix("_text")  # as the language model of several kinds of input is called
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind or "")
    if family not in ACCELERATED or name is None:
        return None
    try:
        accelerate(family)
    except ImportError as error:  # another version of transformers has the model
        raise ValueError(str(error)) from None
    return getattr(transformers, name)  # FLA, once it is imported, has AutoModel read its own mamba2


def _tokenizer(folder: Path) -> Any:
    return _read(folder, "tokenizer", lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _read(folder: Path, what: str, read: Callable[[], Any]) -> Any:
    """Returns the result of `read`. Turns any exception that it raises into a ValueError of one line."""
    try:
        return read()
    except Exception as error:  # exceptions of many classes, most of them with several lines
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ValueError(
            f"{folder} has no {what} that transformers reads ({reason}); "
            "expected files that save_pretrained has written, whole"
        ) from None
