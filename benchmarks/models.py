"""Measures training and generation of FLA's GLA model, of the same after `accelerate()`, and of gla_transformers'.

They need flash-linear-attention 0.6.0, transformers and gla_transformers. The model is FLA's with 374M parameters:
hidden size 1024, 24 layers, 4 heads, 32,000 words, in bfloat16, with random weights. FLA's KDA and Gated DeltaNet
models of this size, with 8 heads of 128, are trained as they are and after `accelerate()`.

    train      A step: forward, backward and fused AdamW. The time of a row is that of all kernels, because the host can
               limit the wall time, which stands beside it with the peak memory and the first step, tuning included.
    generate   Greedy decoding by `generate` after a prompt of 512 tokens. The time is that of a step, on the wall.
    graph      The same in a CUDA graph of several steps. FLA returns new states, so the last step of the graph copies
               them to the place where the first step reads them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from record import Job, counted, free_memory
from torch import Tensor

from gla_core.bench.measure import synchronize
from gla_core.compat.fla import accelerate

SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32000}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
WITH_DELTA_RULE = ("KDA", "GatedDeltaNet")
HEADS = {"GLA": {"num_heads": 4}} | {kind: {"num_heads": 8, "head_dim": 128, "expand_v": 1} for kind in WITH_DELTA_RULE}
"""The heads of each kind of model, as its configuration names them."""
SMALL_HEADS = {kind: heads | {"num_heads": 2} for kind, heads in HEADS.items()}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
PROMPT = 512
NEW, PER_GRAPH, REPLAYS, REPEATS = 64, 8, 16, 5
WARM_UP, STEPS, PROFILED = 3, 10, 5
GLA_KERNELS = re.compile(
    r"(?!triton_)\w*(chunk_|gla|_state_kernel|_gate_kernel|_gradient_kernel|_build_states|_scan|_pairs)"
)
"""The names of FLA's and our kernels for gated linear attention. Kernels of torch.compile begin with `triton_`."""
WAYS = {
    "fla": "fla",
    "accelerated": "fla after accelerate()",
    "compiled": "gla_transformers, compiled",
    "ours": "gla_transformers",
}
"""The implementations, as rows name them. "compiled" is the loss under torch.compile(fullgraph=True)."""
Row = dict[str, Any]


class Task(NamedTuple):
    """A measurement of `what` by an implementation `way`, for `sequences` of `tokens` each; decoding reads prompts.

    Attributes:
        model: the kind of model, a name of `HEADS`.
    """

    what: str
    way: str
    sequences: int
    tokens: int
    model: str = "GLA"


def tasks(device: torch.device, delta: bool = False) -> list[Task]:
    """Returns the measurements to make, of GLA models or of those with a delta rule. There are few on a CPU."""
    ways = ("accelerated",) if device.type == "cpu" else ("fla", "accelerated")
    if delta:
        sizes = ((2, 70),) if device.type == "cpu" else ((8, 2048), (1, 16384))
        return [Task("train", way, B, T, model) for model in WITH_DELTA_RULE for B, T in sizes for way in ways]
    if device.type == "cpu":
        return [
            Task(what, way, 2, 70) for what, way in (("train", "accelerated"), ("generate", "ours"), ("graph", "ours"))
        ]
    made = [Task("train", way, 8, 2048) for way in ("fla", "accelerated", "compiled", "ours")]
    made += [Task("graph", way, B, PROMPT) for B in (1, 8, 64) for way in ("fla", "ours")]
    made += [Task("generate", way, 8, PROMPT) for way in ("fla", "ours")]
    return made + [Task("train", way, 1, 16384) for way in ("fla", "accelerated", "compiled")]


def jobs(device: torch.device, delta: bool = False) -> list[Job]:
    """Returns a job for each of the `tasks`; rows are compared with FLA's model as it is."""
    made, planned = [], tasks(device, delta)
    for task in planned:
        compared = task.way != "fla" and task._replace(way="fla") in planned
        row = (call_in_words(task), WAYS[task.way], "fla" if compared else None)
        made.append(Job([row], functools.partial(measure, task, device)))
    return made


def call_in_words(task: Task) -> str:
    """Returns the words of a task, such as "training step, 8 x 2048 tokens"."""
    if task.what == "train":
        model = "" if task.model == "GLA" else f" of {task.model}"
        return f"training step{model}, {task.sequences} x {task.tokens} tokens"
    how = "in a CUDA graph" if task.what == "graph" else "by `generate`"
    return f"decoding {how}, {counted(task.sequences, 'sequence')}"


def measure(task: Task, device: torch.device) -> list[Row]:
    """Returns the fields of one row: the median of a task's times in seconds, their spread, and facts."""
    run = {"train": _train, "generate": _generate, "graph": _in_graph}[task.what]
    try:
        with model_of(task.way, device, task.model) as model:
            return [run(task.way, model, tokens_of(task.sequences, task.tokens, device))]
    finally:
        free_memory()


def sizes(device: torch.device, kind: str = "GLA") -> dict[str, int]:
    """Returns the sizes of a kind of model, which is small on a CPU."""
    return SIZES | HEADS[kind] if device.type == "cuda" else SMALL | SMALL_HEADS[kind]


@contextlib.contextmanager
def model_of(way: str, device: torch.device, kind: str = "GLA", **changed: int) -> Iterator[Any]:
    """Makes the model of a way with random weights, in bfloat16 on a GPU; `changed` replaces the usual sizes."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with contextlib.ExitStack() as stack:
        if way in ("fla", "accelerated"):
            models = importlib.import_module("fla.models")
            if way == "accelerated" or device.type == "cpu":
                stack.enter_context(accelerate(cpu=device.type == "cpu"))
        else:
            models = importlib.import_module("gla_transformers")
        config = getattr(models, f"{kind}Config")(**{**sizes(device, kind), **changed}, **NO_END)
        with device:  # made on its device: a CPU takes seconds for the random weights
            model = getattr(models, f"{kind}ForCausalLM")(config)
        yield model.to(device, dtype)
    if way == "compiled":
        torch._dynamo.reset()  # each length is compiled without regard to earlier lengths


def tokens_of(B: int, T: int, device: torch.device) -> Tensor:
    """Returns random words [B, T] without padding."""
    return torch.randint(1, sizes(device)["vocab_size"], (B, T), device=device)


# ---- training


def training_step(way: str, model: Any, words: Tensor) -> Callable[[], None]:
    """Returns a function that trains the model by one step on words [B, T]."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=words.is_cuda)

    def loss_of(words: Tensor) -> Tensor:
        return model(words, labels=words).loss

    loss = torch.compile(loss_of, fullgraph=True, dynamic=False) if way == "compiled" else loss_of

    def step() -> None:
        loss(words).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _train(way: str, model: Any, words: Tensor) -> Row:
    cuda, device = words.is_cuda, words.device
    step = training_step(way, model, words)
    first = _seconds(step, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP if cuda else 0):
        step()
    wall = _spread([_seconds(step, device) for _ in range(STEPS if cuda else 2)])
    facts = {"tokens/s": words.numel() / wall["seconds"], "first step, s": first}
    if not cuda:
        return {**wall, "facts": facts}
    memory = torch.cuda.max_memory_allocated() / 2**30
    kernels = [_kernel_seconds(step) for _ in range(PROFILED)]
    facts |= {"wall, s": wall["seconds"], "wall spread": wall["spread"], "GiB": memory}
    if model.config.model_type == "gla":
        facts["of GLA, s"] = statistics.median(gla for _, gla in kernels)
    return {**_spread([every for every, _ in kernels]), "facts": facts}


def _kernel_seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Returns the seconds of all kernels of a step, and of its GLA kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e6 for event in profile.key_averages()}
    return sum(kernels.values()), sum(seconds for name, seconds in kernels.items() if GLA_KERNELS.match(name))


# ---- generating


def _generate(way: str, model: Any, words: Tensor) -> Row:
    new = NEW if words.is_cuda else 3
    model.eval()

    def run(number: int) -> float:
        options = {"min_new_tokens": number, "max_new_tokens": number, "do_sample": False}
        return _seconds(lambda: model.generate(words, **options), words.device)

    for _ in range(6 if words.is_cuda else 1):  # compiles and tunes; ours captures its steps, then its prompts
        run(6 if words.is_cuda else 3)
    first = statistics.median(run(1) for _ in range(3))
    times = [(run(new) - first) / (new - 1) for _ in range(3)]  # seconds per token after the first
    return _decoded(times, first, words)


def _in_graph(way: str, model: Any, words: Tensor) -> Row:
    """Measures decoding in a CUDA graph; on a CPU the steps run eagerly."""
    model.eval()
    with torch.no_grad():
        decoding = Decoding(way, model, words)
        first = statistics.median(_seconds(decoding.start, words.device) for _ in range(3))
        again = _captured(decoding.steps) if words.is_cuda else decoding.steps
        same = torch.equal(_after(decoding, decoding.steps), _after(decoding, again))
        replays = REPLAYS if words.is_cuda else 1

        def replay() -> None:
            for _ in range(replays):
                again()

        times = [_seconds(replay, words.device) / replays / PER_GRAPH for _ in range(REPEATS)]
    row = _decoded(times, first, words)
    return {**row, "facts": {**row["facts"], "same words": same}}


class Decoding:
    """Greedy decoding with states that stay at their address, so that a CUDA graph can hold its steps.

    Attributes:
        word: the newest words [B, 1].
    """

    def __init__(self, way: str, model: Any, words: Tensor) -> None:
        self.model, self.words, self.homes = model, words, []
        self.word = words[:, -1:].clone()
        if way == "ours":
            self.cache = importlib.import_module("gla_transformers").GLACache(model.config, compileable=True)
        else:
            self.cache = importlib.import_module("fla.models.utils").Cache()
            self.homes = [None] * model.config.num_hidden_layers

    def start(self) -> None:
        """Reads the prompt, and decodes the first word."""
        if len(self.cache.layers) and self.cache.layers[0].is_initialized:
            self.cache.reset()
        self.word.copy_(self._read(self.words))
        self._settle()

    def steps(self) -> None:
        """Decodes `PER_GRAPH` more words."""
        for _ in range(PER_GRAPH):
            self.word.copy_(self._read(self.word))
        self._settle()

    def _read(self, words: Tensor) -> Tensor:
        output = self.model(words, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(-1)

    def _settle(self) -> None:
        """Copies the states that FLA's layers returned to the place of their first states; ours write in place."""
        for i, home in enumerate(self.homes):
            state = self.cache.layers[i].state
            if home is None:
                self.homes[i] = state["recurrent_state"]
            else:
                state["recurrent_state"] = home.copy_(state["recurrent_state"])


def _captured(steps: Callable[[], None]) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # tunes and allocates before the capture
        steps()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    return graph.replay


def _after(decoding: Decoding, steps: Callable[[], None]) -> Tensor:
    """Returns the words after the prompt and one call of `steps`."""
    decoding.start()
    steps()
    return decoding.word.clone()


def _decoded(times: Sequence[float], first: float, words: Tensor) -> Row:
    """Returns a row with the seconds per word of each sequence, and the seconds to the first word."""
    speed = words.shape[0] / statistics.median(times)
    return {**_spread(times), "facts": {"tokens/s": speed, "first token, s": first}}


def _spread(times: Sequence[float]) -> Row:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return {"seconds": median, "spread": (third - first) / median}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


# ---- compilation beforehand


def compile_share(share: int, shares: int, device: torch.device, delta: bool = False) -> None:
    """Fills the caches with the kernels of a compiled model, or with a share of FLA's kernels."""
    compiled = [task for task in tasks(device, delta) if task.way == "compiled"]
    if share < len(compiled):
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # other processes compile at the same time
        task = compiled[share]
        with model_of(task.way, device) as model:
            training_step(task.way, model, tokens_of(task.sequences, task.tokens, device))()
    else:
        importlib.import_module("gla_fla.tune").compile_only(share - len(compiled), shares - len(compiled))
        for kind in WITH_DELTA_RULE if delta else ("GLA",):
            run_fla_once(device, kind)


def run_fla_once(device: torch.device, kind: str) -> None:
    """Calls every kernel of FLA's model once, on short texts and one layer; if launches are off, this only compiles."""
    for B in (8, 1):  # FLA compiles for each number of sequences, but not for each number of tokens
        with model_of("fla", device, kind, num_hidden_layers=1) as model:
            words = tokens_of(B, 256, device)
            # Without launches nothing is computed, so code that reads results may fail.
            with contextlib.suppress(Exception):
                model(words, labels=words).loss.backward()
            with contextlib.suppress(Exception), torch.no_grad():
                model.eval().generate(words, max_new_tokens=3)
