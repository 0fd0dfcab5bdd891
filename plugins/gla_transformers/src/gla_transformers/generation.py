"""Greedy search and sampling as transformers' `generate` computes them, without its waits for the device.

    host      launches tokens 5 to 8         stops, criteria, streamer: tokens 1 to 4         launches tokens 9 to 12
    device    reads and chooses 1 to 4       reads and chooses 5 to 8                         ...

transformers' loop waits for each token before it launches the next one. Here the device chooses a token from the
logits, and reads it, in memory that stays where it is, so that several tokens can be one CUDA graph. The host looks at
them while the device goes on. What lies behind the end of all rows is cut off, and the generator of random numbers
goes back to where it was at the end.

A processor of logits or an option that is not computed here leaves the whole call to transformers' loop.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    GenerateDecoderOnlyOutput,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from gla_transformers.cache import NAME
from gla_transformers.graphs import CAPTURES

TOKENS = 4
"""Number of tokens that are launched at once on a GPU, while the host looks at as many before them."""
FROM_SCORES = (
    *(EpsilonLogitsWarper, LogitNormalization, MinPLogitsWarper, TemperatureLogitsWarper),
    *(TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper),
)
"""Processors of logits that read nothing but scores, and do not wait for the device."""
INPUTS = {"attention_mask", "cache", "cache_params", "inputs_embeds", "logits_to_keep", "past_key_values", "use_cache"}
"""Names of the arguments of models with which steps are computed here."""
LEAST_LENGTHS = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)


class Rules(NamedTuple):
    """Rules by which tokens are chosen and a generation ends.

    Attributes:
        is_sampling: whether tokens are drawn; otherwise the likeliest one is taken.
        processors: the processors of logits, in their order.
        limit: the number of tokens of a row at which it ends, with the prompt.
        stop: the criterion of tokens that end a row, if any.
        pad: the token [] that follows the end of a row; None without `stop`.
        criteria: the other stopping criteria.
        lengths: the criteria that make `limit`.
    """

    is_sampling: bool
    processors: Sequence[Any]
    limit: int
    stop: EosTokenCriteria | None
    pad: Tensor | None
    criteria: StoppingCriteriaList
    lengths: Sequence[MaxLengthCriteria]

    def key(self) -> Hashable:
        """Returns what is computed on the device, apart from the values of a `State`."""
        return self.is_sampling, self.stop is not None, *map(_key, self.processors)


def rules(
    model: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any, synced_gpus: bool, inputs: Any
) -> Rules | None:
    """Returns the rules of a call of `_sample`; None if it asks for more than is computed here.

    Args:
        config: the configuration of the generation.
        inputs: the arguments of the model.
    """
    if synced_gpus or config.is_assistant or model.device != input_ids.device or not {*inputs} <= INPUTS:
        return None
    if config.output_scores or config.output_logits or config.output_attentions or config.output_hidden_states:
        return None
    kinds = [type(x) for x in processors]
    if not {*kinds} <= {*FROM_SCORES, *LEAST_LENGTHS, RepetitionPenaltyLogitsProcessor}:
        return None
    if any(kind in LEAST_LENGTHS and before in FROM_SCORES for before, kind in itertools.pairwise(kinds)):
        return None
    lengths = [x for x in criteria if type(x) is MaxLengthCriteria]
    stops = [x for x in criteria if hasattr(x, "eos_token_id")]
    pad = config._pad_token_tensor
    if not lengths or len(stops) > 1 or any(type(x) is not EosTokenCriteria or pad is None for x in stops):
        return None
    if input_ids.device.type not in ("cpu", *CAPTURES):
        return None
    others = StoppingCriteriaList(x for x in criteria if x not in lengths and x not in stops)
    limit = max(min(x.max_length for x in lengths), input_ids.shape[1] + 1)
    stop = stops[0] if stops else None
    pad = None if stop is None or pad is None else pad.to(input_ids.device)
    return Rules(config.do_sample, list(processors), limit, stop, pad, others, lengths)


class State(NamedTuple):
    """Tensors that the device keeps from one token to the next, of B rows and V tokens of the vocabulary.

    Attributes:
        word: [B] int64, the last token of each row.
        going: [B] bool, whether a row has not ended.
        length: [] int64, the number of tokens of each row.
        stops: [V] bool, the tokens that end a row.
        pad: [] int64.
        least: [V] int64, the length of a row from which on a token may follow.
        seen: [B, V + 1] bool, the tokens that the repetition penalty concerns. The last column is for tokens without
            logits.
    """

    word: Tensor
    going: Tensor
    length: Tensor
    stops: Tensor
    pad: Tensor
    least: Tensor
    seen: Tensor


def state_of(rules: Rules, input_ids: Tensor, V: int) -> State:
    """Returns the state before the first new token of rows `input_ids` [B, T] with logits [B, V]."""
    (B, T), device = input_ids.shape, input_ids.device
    words = torch.arange(V, device=device)
    stops, least = torch.zeros_like(words, dtype=torch.bool), torch.zeros_like(words)
    if rules.stop is not None:
        stops = torch.isin(words, rules.stop.eos_token_id.to(device))
    seen = torch.zeros(B, 1, dtype=torch.bool, device=device)
    for x in rules.processors:
        if type(x) in LEAST_LENGTHS:
            length = x.min_length if type(x) is MinLengthLogitsProcessor else x.prompt_length_to_skip + x.min_new_tokens
            least = torch.maximum(least, length * torch.isin(words, x.eos_token_id.to(device)))
        if type(x) is RepetitionPenaltyLogitsProcessor:
            begin = x.prompt_ignore_length
            begin = 0 if begin is None else begin[:, None].to(device) if isinstance(begin, Tensor) else begin
            ignored = torch.arange(T, device=device).expand(B, T) < begin
            concerned = input_ids.long().clamp(max=V).masked_fill(ignored, V)
            seen = torch.zeros(B, V + 1, dtype=torch.bool, device=device).scatter_(1, concerned, True)
    word, going = torch.zeros_like(words[:1]).repeat(B), torch.ones(B, dtype=torch.bool, device=device)
    pad = word.new_zeros(()) if rules.pad is None else rules.pad.reshape(()).clone()
    return State(word, going, torch.full_like(pad, T), stops, pad, least, seen)


def choose(rules: Rules, state: State, logits: Tensor, record: Tensor) -> None:
    """Chooses a token of each row from logits [B, V], as transformers does, and updates the state.

    Writes the tokens to record[0] and whether rows go on to record[1]. A token is -1 if the logits of its row are not
    probabilities.
    """
    scores = logits.to(state.word.device, torch.float32)
    for x in rules.processors:
        if type(x) is RepetitionPenaltyLogitsProcessor:
            penalised = torch.where(scores < 0, scores * x.penalty, scores / x.penalty)
            scores = torch.where(state.seen[:, :-1], penalised, scores)
        elif type(x) in LEAST_LENGTHS:
            scores = scores.masked_fill(state.length < state.least, -torch.inf)
        else:
            scores = x(None, scores)
    if rules.is_sampling:  # as `torch.multinomial` computes it, but without its wait for a check
        p = scores.softmax(-1)
        likeliest, word = (p / torch.empty_like(p).exponential_()).max(-1)
        told = word.masked_fill(likeliest.isnan(), -1)
    else:
        told = word = scores.argmax(-1)
    if rules.stop is not None:
        told = torch.where(state.going, told, state.pad)
        state.going.logical_and_(state.stops[word].logical_not())
    if state.seen.shape[1] > 1:
        state.seen.scatter_(1, word[:, None], True)
    state.word.copy_(word if told is word else told.clamp(min=0))
    state.length.add_(1)
    record[0].copy_(told)
    record[1].copy_(state.going)


def steps(rules: Rules, state: State, n: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Chooses n tokens of each row, and returns the records [n, 2, B] of `choose`.

    Args:
        read: reads a token [B, 1] of each row, and returns logits [B, V] of the next one.
    """
    records = state.word.new_empty(n, 2, len(state.word))
    for record in records:
        choose(rules, state, read(state.word[:, None]), record)
    return records


def sample(
    model: Any,
    rules: Rules,
    input_ids: Tensor,
    config: Any,
    streamer: Any,
    inputs: Any,
    cache: Any,
    advance: Callable[[State, int], Tensor],
) -> Any:
    """Returns what transformers' `_sample` returns for a prompt `input_ids` [B, T] or embeddings.

    Args:
        config: the configuration of the generation.
        inputs: the arguments of the model.
        cache: the cache among them.
        advance: computes `steps` for a state and a number of tokens.

    Raises:
        RuntimeError: tokens are drawn from logits that are not probabilities.
    """
    outputs = model._prefill(input_ids, config, inputs, is_first_iteration=True)
    device = input_ids.device
    logits = outputs.logits[:, -1].to(device)
    # A cache that somebody keeps must not read past the end.
    is_kept = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    is_exact = is_kept and (rules.stop is not None or len(rules.criteria) > 0)
    most, ahead = (1, 0) if is_exact or device.type not in CAPTURES else (TOKENS, 1)

    state, taken = state_of(rules, input_ids, logits.shape[1]), _Taken(rules, input_ids, streamer)
    first = _Launched(rules, device, lambda: steps(rules, state, 1, lambda _: logits))
    waiting, length = deque([first]), input_ids.shape[1] + 1
    while waiting:
        launched = waiting.popleft()
        number = taken.take(launched.records())
        if taken.has_ended():
            if number < launched.number or waiting:
                launched.rewind(logits, number)
            break
        if is_exact:
            state.going.logical_and_(taken.ended.logical_not().to(device))
        while len(waiting) <= ahead and length < rules.limit:
            n = most if length + most <= rules.limit else 1
            waiting.append(_Launched(rules, device, functools.partial(advance, state, n)))
            length += n
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, torch.stack(taken.columns, 1).to(device)], 1)
    for criterion in rules.lengths:  # it warns of a model's greatest length
        criterion(sequences[:, : rules.limit - 1], None)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **{NAME: cache})  # pyright: ignore[reportArgumentType]


class _Launched:
    """Tokens on their way to the host.

    Attributes:
        number: number of tokens of each row.
    """

    def __init__(self, rules: Rules, device: torch.device, compute: Callable[[], Tensor]) -> None:
        self.random = _generator(device).get_state() if rules.is_sampling else None
        records = compute()
        self.number = len(records)
        self.there = torch.empty_like(records, device="cpu", pin_memory=records.is_cuda)
        self.there.copy_(records, non_blocking=True)
        self.event = torch.cuda.current_stream(device).record_event() if records.is_cuda else None

    def records(self) -> Tensor:
        """Waits for the tokens, and returns the records of `choose`, [number, 2, B]."""
        if self.event is not None:
            self.event.synchronize()
        return self.there

    def rewind(self, logits: Tensor, n: int) -> None:
        """Puts the generator of random numbers where it was after n tokens."""
        if self.random is not None:
            _generator(logits.device).set_state(self.random)
            for _ in range(n):
                torch.empty_like(logits, dtype=torch.float32).exponential_()


class _Taken:
    """The tokens that the host has seen.

    Attributes:
        columns: the new tokens, [B] each.
        ended: [B] bool, the rows that have ended.
    """

    def __init__(self, rules: Rules, input_ids: Tensor, streamer: Any) -> None:
        self.rules, self.input_ids, self.streamer = rules, input_ids, streamer
        self.pad = rules.pad.cpu() if rules.criteria and rules.pad is not None else None
        self.columns: list[Tensor] = []
        self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")

    def has_ended(self) -> bool:
        """Returns whether all rows have ended."""
        return bool(self.ended.all())

    def take(self, records: Tensor) -> int:
        """Takes tokens from the records of `choose`, until all rows have ended, and returns their number."""
        for n, (tokens, going) in enumerate(records, 1):
            if self.rules.is_sampling and bool((tokens < 0).any()):
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            self._take(tokens, going)
            if self.has_ended():
                return n
        return len(records)

    def _take(self, tokens: Tensor, going: Tensor) -> None:
        if self.rules.criteria:
            if self.pad is not None:  # the device does not know of the end by a criterion yet
                tokens = torch.where(self.ended, self.pad, tokens)
            device = self.input_ids.device
            self.input_ids = torch.cat([self.input_ids, tokens[:, None].to(device)], 1)
            self.ended |= self.rules.criteria(self.input_ids, None).cpu()  # pyright: ignore[reportArgumentType]
        self.ended |= going == 0
        self.columns.append(tokens)
        if self.streamer is not None:
            self.streamer.put(tokens)


def _generator(device: torch.device) -> torch.Generator:
    """Returns PyTorch's own generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _key(processor: Any) -> Hashable:
    if type(processor) in LEAST_LENGTHS:
        return type(processor)
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return type(processor), processor.penalty
    return type(processor), *sorted(vars(processor).items())
