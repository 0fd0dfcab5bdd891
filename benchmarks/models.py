"""How fast do whole models train and generate? FLA's GLA model, the same after `accelerate()`, and gla_transformers'.

    python3 benchmarks/models.py [--out benchmarks/results] [--ways fla,accelerated,ours] [--what train,generate]
    python3 benchmarks/models.py --share 0/16     one of 16 processes that fill Triton's cache with FLA's kernels first

Needs flash-linear-attention 0.6.0, transformers and gla_transformers, and for --share gla_fla. The model is FLA's of
340M parameters: hidden size 1024, 24 layers, 4 heads, 32,000 words, bfloat16, of random weights.

    train      a step of B8 T2048: forward, backward and fused AdamW. Wall time, the median of steps one after the
               other, each to its end; kernels by themselves, and those of gated linear attention; the most memory held.
    generate   greedily, after a prompt of 512 tokens, for B 1, 8, 64: seconds to the first token, tokens a second
               after it.

    fla            as it is                         compiled   ours, the loss under torch.compile(fullgraph=True)
    accelerated    after compat.fla.accelerate()    blocks     ours, each layer compiled by itself
    ours           gla_transformers, eager          graph      ours, decoding in a CUDA graph
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla_core.bench import results
from gla_core.bench.measure import synchronize
from gla_core.compat.fla import accelerate
from gla_core.files import write_json

SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 61}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
WAYS = {
    "train": ("fla", "accelerated", "ours", "blocks", "compiled"),
    "generate": ("fla", "accelerated", "ours", "graph"),
}
BATCH, TOKENS, PROMPT, NEW, ROWS = 8, 2048, 512, 64, (1, 8, 64)
WARM_UP, STEPS = 3, 10
OF_GLA = re.compile(
    r"(?!triton_)\w*(chunk_|gla|_state_kernel|_gate_kernel|_gradient_kernel|_build_states|_scan|_pairs)"
)
"""Names of kernels, FLA's and ours, that compute gated linear attention; those of torch.compile's have a prefix."""
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, write a file after every row."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if options.share:
        share, shares = map(int, options.share.split("/"))
        compile_share(share, shares, device)
        return
    found: Row = {**results.conditions(device, options.commit), "model": sizes(device), "rows": []}
    path = options.out / results.file_name("models", device)
    for what in options.what:
        for way in (way for way in WAYS[what] if way in options.ways):
            for row in (train if what == "train" else generate)(way, device):
                found["rows"].append({"what": what, "way": way, **row})
                print(json.dumps(found["rows"][-1]), flush=True)
                write_json(path, found)


def sizes(device: torch.device) -> Row:
    """Of the model: small on a CPU."""
    return SIZES if device.type == "cuda" else SMALL


@contextlib.contextmanager
def model_of(way: str, device: torch.device) -> Iterator[Any]:
    """The model of a way, in bfloat16 on a GPU; weights are random, and the same for all."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with contextlib.ExitStack() as stack:
        if way in ("fla", "accelerated"):
            models = importlib.import_module("fla.models")
            if way == "accelerated" or device.type == "cpu":
                stack.enter_context(accelerate(cpu=device.type == "cpu"))
        else:
            models = importlib.import_module("gla_transformers")
        yield models.GLAForCausalLM(models.GLAConfig(**sizes(device), **NO_END)).to(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tokens_of(B: int, T: int, device: torch.device) -> Tensor:
    """Random words [B, T], and no padding."""
    return torch.randint(1, sizes(device)["vocab_size"], (B, T), device=device)


# ---- training


def train(way: str, device: torch.device) -> Iterator[Row]:
    """A step of training."""
    cuda = device.type == "cuda"
    B, T = (BATCH, TOKENS) if cuda else (2, 80)
    with model_of(way, device) as model:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
        words = tokens_of(B, T, device)
        loss_of = _loss_of(way, model)

        def step() -> None:
            loss_of(words).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        started = time.perf_counter()
        step()
        synchronize(device)
        first = time.perf_counter() - started
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP if cuda else 1):
            step()
        seconds = statistics.median(_seconds(step, device) for _ in range(STEPS if cuda else 2))
        row: Row = {"seconds": seconds, "tokens_per_second": B * T / seconds, "first_step": first}
        if cuda:
            row |= {"gib": torch.cuda.max_memory_allocated() / 2**30, **_of_kernels(step)}
        yield row


def _loss_of(way: str, model: Any) -> Callable[[Tensor], Tensor]:
    def loss(words: Tensor) -> Tensor:
        return model(words, labels=words).loss

    if way == "blocks":
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    return torch.compile(loss, fullgraph=True) if way == "compiled" else loss


def _of_kernels(step: Callable[[], None]) -> Row:
    """Seconds of all kernels of a step, and of those of gated linear attention."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e6 for event in profile.key_averages()}
    of_gla = sum(seconds for name, seconds in kernels.items() if OF_GLA.match(name))
    return {"device_seconds": sum(kernels.values()), "gla_seconds": of_gla}


# ---- generating


def generate(way: str, device: torch.device) -> Iterator[Row]:
    """The first token of a prompt, and those after it, for several numbers of rows."""
    prompt, new, rows = (PROMPT, NEW, ROWS) if device.type == "cuda" else (70, 3, (2,))
    with model_of(way, device) as model, torch.no_grad():
        model.eval()
        for B in rows:
            words = tokens_of(B, prompt, device)
            run = _in_a_graph if way == "graph" else _by_generate
            first, rest = run(model, words, new, device)
            yield {"rows": B, "first_token": first, "tokens_per_second": B * (new - 1) / rest}


def _by_generate(model: Any, words: Tensor, new: int, device: torch.device) -> tuple[float, float]:
    """Seconds to the first token, and of the others, by `generate`."""

    def run(number: int) -> float:
        options = {"min_new_tokens": number, "max_new_tokens": number, "do_sample": False}
        return min(_seconds(lambda: model.generate(words, **options), device) for _ in range(2))

    run(3)  # what is compiled and tuned
    first = run(1)
    return first, run(new) - first


def _in_a_graph(model: Any, words: Tensor, new: int, device: torch.device) -> tuple[float, float]:
    """The same where a step is a CUDA graph, captured after the prompt; on a CPU it is called."""
    from gla_transformers import GLACache

    cache = GLACache(model.config, compileable=True)

    def read(given: Tensor) -> Tensor:
        return model(given, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)  # [B, 1]

    read(words)
    first = min(_seconds(lambda: (cache.reset(), read(words)), device) for _ in range(3))
    word = words[:, -1:].clone()

    def step() -> None:
        word.copy_(read(word))

    again = step
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    return first, min(_seconds(lambda: [again() for _ in range(new - 1)], device) for _ in range(3))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


# ---- before


def compile_share(share: int, shares: int, device: torch.device) -> None:
    """Compile one share of what FLA tries when it tunes, for a step of training and a short text; launch none of it."""
    from gla_fla.tune import compile_only

    compile_only(share, shares)
    with model_of("fla", device) as model:
        with contextlib.suppress(Exception):  # nothing is computed: what reads results may fail
            model(tokens_of(2, 256, device), labels=tokens_of(2, 256, device)).loss.backward()
        with contextlib.suppress(Exception), torch.no_grad():
            model.eval().generate(tokens_of(2, 256, device), max_new_tokens=3)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    every = list(dict.fromkeys(way for ways in WAYS.values() for way in ways))
    parser.add_argument("--ways", type=lambda text: text.split(","), default=every, help=", ".join(every))
    parser.add_argument("--what", type=lambda text: text.split(","), default=list(WAYS), help="train, generate")
    parser.add_argument("--commit", help="of the source, where it cannot be asked of git")
    parser.add_argument("--share", metavar="I/N", help="compile FLA's kernels, one share of N")
    return parser


if __name__ == "__main__":
    main()
