"""Text from a folder with a GLA model and its tokenizer: what `gla generate` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer
from transformers.utils import logging

from gla_transformers.configuration import GLAConfig
from gla_transformers.modeling import GLAForCausalLM


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose; a temperature of 0 always takes the likeliest token, `dtype` None is the folder's."""

    folder: Path
    prompt: str
    device: torch.device
    max_new_tokens: int = 100
    temperature: float = 0.7
    seed: int = 0
    dtype: torch.dtype | None = None


def run_generate(options: Options) -> None:
    """Print the prompt and what the model makes of it, a word at a time.

    Raises:
        ValueError: the folder has no GLA model, not all its weights or no tokenizer, or the prompt has no tokens.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    model, tokenizer = _model(options), _tokenizer(options.folder)
    tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"].to(options.device)
    if tokens.shape[1] == 0:
        raise ValueError("the prompt has no tokens; pass some text as --prompt")
    if tokens.max() >= model.vocab_size:
        raise ValueError(
            f"the prompt has token {tokens.max()} of a model with {model.vocab_size}; "
            "expected the tokenizer that the model was trained with"
        )
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=options.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **sampling,
    )


def _model(options: Options) -> Any:
    folder = options.folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; expected a folder that save_pretrained has written")
    kind = GLAConfig.get_config_dict(folder)[0].get("model_type")
    if kind != GLAConfig.model_type:
        raise ValueError(f"{folder} has a model of type {kind!r}; expected {GLAConfig.model_type!r}")
    model, report = GLAForCausalLM.from_pretrained(
        folder, dtype=options.dtype or "auto", local_files_only=True, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks the weights {', '.join(sorted(report['missing_keys']))}")
    return model.to(options.device).eval()


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds, most of several lines
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{folder} has no tokenizer that transformers reads ({type(error).__name__}: {reason}); "
            "save one there by tokenizer.save_pretrained"
        ) from None
