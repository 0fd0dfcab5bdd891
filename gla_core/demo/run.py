"""The demo from beginning to end: everything that `gla demo` prints, in that order."""

from __future__ import annotations

import codecs
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

import gla_core as gla
from gla_core.demo import baselines, evaluate
from gla_core.demo.corpus import Corpus, standard_library
from gla_core.demo.model import LanguageModel
from gla_core.demo.train import SETTINGS, Budget, Settings, train
from gla_core.ops.gla import BACKWARD, FORWARD, STEP
from gla_core.terminal import print_explanation

EVALUATED = 2**17  # number of bytes of held-out text
COMPARED = 512  # number of bytes that both forms evaluate
TOLERANCE = 1e-3  # largest difference of logits; float32 rounding gives about 2e-5


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. Without steps and seconds, the training takes the time in `SETTINGS`."""

    device: torch.device
    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    prompt: str = "def "
    tokens: int = 400
    temperature: float = 0.7


def run_demo(
    options: Options, console: Console, corpus: Corpus | None = None, settings: Settings | None = None
) -> bool:
    """Trains, evaluates, generates, compares and explains.

    Returns:
        Whether the demo succeeded: both forms of the model agree, and the model beats the bigram model. The second
        condition is dropped if the options or Ctrl-C cut the training short.

    Raises:
        KeyboardInterrupt: Ctrl-C after the training.
    """
    corpus = standard_library() if corpus is None else corpus
    settings = SETTINGS[options.device.type] if settings is None else settings
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = LanguageModel(settings.width, settings.blocks, settings.heads).to(options.device)

    _introduce(model, corpus, options, console)
    interrupted = _train(model, corpus, settings, options, generator, console)
    beats_bigram = _compare_with_counting(model, corpus, settings, console)
    _generate(model, options, generator, console)
    agree = _compare_forms(model, corpus, console)
    _explain(model, settings, options.device, console)

    cut_short = interrupted or options.steps is not None or options.seconds is not None
    return agree and (beats_bigram or cut_short)


def _introduce(model: LanguageModel, corpus: Corpus, options: Options, console: Console) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    files, held_out = len(corpus.train_files), len(corpus.held_out_files)
    console.print(
        f"The text: the standard library of Python {platform.python_version()}. "
        f"{len(corpus.train) / 1e6:.1f} MB in {files} files to learn from, "
        f"{len(corpus.held_out) / 1e6:.1f} MB in {held_out} files held out.\n"
        f"The model: {size:,} parameters on {options.device}, which read bytes and predict the next.\n"
        "Ctrl-C ends the training and goes on with what was learned so far.\n"
    )


def _train(
    model: LanguageModel,
    corpus: Corpus,
    settings: Settings,
    options: Options,
    generator: torch.Generator,
    console: Console,
) -> bool:
    """Trains under a progress bar; returns whether Ctrl-C ended the training."""
    budget = Budget(options.seconds or settings.seconds, options.steps)
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[status]}"))
    bits = None  # an average that follows the last steps
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=1.0, status="")
        try:
            for now in train(model, corpus.train, settings, budget, generator):
                bits = now.bits_per_byte if bits is None else 0.95 * bits + 0.05 * now.bits_per_byte
                status = f"{bits:.2f} bits per byte, {now.bytes_per_second:,.0f} bytes/s, step {now.steps}"
                bar.update(task, completed=now.used, status=status)
        except KeyboardInterrupt:
            console.print("Interrupted: going on with what was learned so far. Ctrl-C again ends the demo.")
            return True
    return False


def _compare_with_counting(model: LanguageModel, corpus: Corpus, settings: Settings, console: Console) -> bool:
    """Prints each model's bits per byte on the same held-out bytes; returns whether GLA beats the bigram model."""
    windows = evaluate.held_out_windows(corpus.held_out, settings.window, EVALUATED // settings.window)
    single, pairs = baselines.unigram(corpus.train), baselines.bigram(corpus.train)
    bits = {
        "unigram": baselines.unigram_bits(single, windows),
        "bigram": baselines.bigram_bits(pairs, windows),
        "gated linear attention": evaluate.model_bits(model, windows, settings.batch),
    }
    table = Table("held-out text", "bits per byte", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    gain = bits["bigram"] - bits["gated linear attention"]
    verb = "beats" if gain > 0 else "falls short of"
    console.print(f"The model {verb} the bigram model by {abs(gain):.3f} bits per byte.\n")
    return gain > 0


def _generate(model: LanguageModel, options: Options, generator: torch.Generator, console: Console) -> None:
    console.print("What it writes, byte by byte in the recurrent form:\n")
    console.print(options.prompt, end="", style="bold", soft_wrap=True)
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    prompt = options.prompt.encode(errors="replace")
    for byte in evaluate.generate(model, prompt, options.tokens, options.temperature, generator):
        console.print(_printable(text.decode(bytes([byte]))), end="", soft_wrap=True)
    console.print("\n")


def _printable(text: str) -> str:
    # A terminal obeys control characters, and the model may write any of them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _compare_forms(model: LanguageModel, corpus: Corpus, console: Console) -> bool:
    """Prints the difference between the two forms of the model; returns whether they agree."""
    text = corpus.held_out[:COMPARED]
    chunked, recurrent = evaluate.both_forms(model, text)
    apart = float((chunked - recurrent).abs().max())
    agree = apart <= TOLERANCE
    console.print(
        f"{len(text)} held-out bytes in the chunked form: {evaluate.bits_of(chunked, text):.6f} bits per byte.\n"
        f"One by one in the recurrent form: {evaluate.bits_of(recurrent, text):.6f} bits per byte.\n"
        f"The logits {'agree' if agree else 'DISAGREE'}: they differ by at most {apart:.1e} "
        f"({TOLERANCE:.0e} is allowed).\n"
    )
    return agree


def _explain(model: LanguageModel, settings: Settings, device: torch.device, console: Console) -> None:
    console.print("Which backend ran each op, and why:\n")
    for explanation in explanations(model, settings, device):
        print_explanation(console, explanation)
        console.print()


def explanations(model: LanguageModel, settings: Settings, device: torch.device) -> Iterator[gla.Explanation]:
    """Explains the ops of the model, on tensors with the model's shapes."""
    layer = model.blocks[0].attention
    tokens = (settings.batch, settings.window)
    q = k = g = torch.empty(*tokens, layer.num_heads, layer.head_k_dim, device=device)
    v = torch.empty(*tokens, layer.num_heads, layer.head_v_dim, device=device)
    yield gla.explain(FORWARD.name, q, k, v, g)
    yield gla.explain(BACKWARD.name, q, k, v, g)
    state = layer.initial_state(1).recurrent
    yield gla.explain(STEP.name, q[:1, 0], k[:1, 0], v[:1, 0], g[:1, 0], state)
