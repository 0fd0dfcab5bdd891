"""Packed sequences, in every way in which collators describe them, against each sequence alone."""

import functools

import pytest
import torch
from transformers import DataCollatorWithFlattening

from gla_transformers import GLACache, packing
from gla_transformers.modeling import GLAModel

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # for float64
ROWS = ((5, 1, 7), (9, 3), (10,))
"""The lengths of the sequences in each row; the rows are padded to 13 tokens."""
ONE = ((5, 1, 7),)


def numbered(rows, front=0, behind=0):
    """Returns the numbers of sequences in the rows from 1 on, [B, T]; 0 is padding, in front if asked for."""
    T = max(map(sum, rows)) + front + behind
    made = torch.zeros(len(rows), T, dtype=torch.long)
    for row, lengths in zip(made, rows, strict=True):
        begin = T - sum(lengths) if front else 0
        for number, length in enumerate(lengths, 1):
            row[begin : begin + length] = number
            begin += length
    return made


def positions(numbers, first=0, counts_padding=True):
    """Returns positions [B, T] that begin anew where the number changes; 0 in padding that is not counted."""
    made = torch.zeros_like(numbers)
    for row, row_numbers in zip(made, numbers, strict=True):
        for number in row_numbers.unique():
            row[row_numbers == number] = torch.arange(int((row_numbers == number).sum())) + first
    return made if counts_padding else made * (numbers != 0)


def flattened(**options):
    """Returns what transformers' collator makes."""
    batch = DataCollatorWithFlattening(**options)([{"input_ids": [1] * length} for length in ONE[0]])
    return numbered(ONE), {name: batch[name] for name in batch if name not in ("input_ids", "labels")}


def trl(behind=0, padding_free=True):
    """Returns what TRL's collator makes with padding_free, or return_position_ids; pad_to_multiple_of is `behind`."""
    numbers = numbered(ONE if padding_free else ROWS, behind=behind)
    said = {"position_ids": positions(numbers, counts_padding=False)}
    if not padding_free:
        return numbers, said | {"attention_mask": (numbers != 0).long()}
    offsets = torch.cat([(said["position_ids"][0] == 0).nonzero()[:, 0], torch.tensor([numbers.shape[1]])]).int()
    said["seq_idx"] = torch.arange(len(offsets) - 1).int().repeat_interleave(offsets.diff())[None]
    return numbers, said | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}


def axolotl(rows=ROWS, front=0, ones=False, squash=False):
    """Returns what axolotl's collators make for sample packing: the mask has numbers or ones, padding has positions."""
    numbers = numbered(rows, front)
    columns = torch.arange(numbers.shape[1]).expand_as(numbers)
    mask = (numbers != 0).long() if ones else numbers
    return numbers, {"attention_mask": mask, "position_ids": columns if squash else positions(numbers)}


def only(name, way):
    return way[0], {name: way[1][name]}


def padding_between():
    """A mask of numbers, and positions, with padding between the tokens of sequences."""
    numbers = numbered(ROWS, behind=1)
    numbers[:, 3:] = numbers[:, 2:-1].clone()
    numbers[:, 2] = 0
    counted = numbers.clone()
    counted[:, 2] = 1
    return numbers, (numbers, positions(numbers, counts_padding=False), positions(counted))


BETWEEN, (MASK, COUNTED, COLUMNS) = padding_between()
WAYS = {
    "transformers": flattened(),
    "transformers, from 2": flattened(position_ids_start=2),
    "transformers, seq_idx": flattened(return_position_ids=False, return_seq_idx=True),
    "transformers, cu_seq_lens": flattened(return_position_ids=False, return_flash_attn_kwargs=True),
    "transformers, all": flattened(return_seq_idx=True, return_flash_attn_kwargs=True),
    "TRL": trl(),
    "TRL, padded": trl(behind=3),
    "TRL, position_ids": only("position_ids", trl(behind=3)),
    "TRL, seq_idx": only("seq_idx", trl(behind=3)),
    "TRL, mask": trl(padding_free=False),
    "TRL, mask, padded": trl(behind=3, padding_free=False),
    "axolotl": axolotl(),
    "axolotl, one row": axolotl(ONE),
    "axolotl, padding in front": axolotl(front=2),
    "axolotl, squashed": axolotl(squash=True),
    "axolotl, ones": axolotl(ones=True),
    "axolotl, ones, one row": axolotl(ONE, ones=True),
    "axolotl, ones, padding in front": axolotl(front=2, ones=True),
    "axolotl, position_ids": only("position_ids", axolotl()),
    "axolotl, mask": only("attention_mask", axolotl()),
    "numbers of rows": (numbered(ROWS), {"seq_idx": numbered(ROWS)}),
    "equal rows": (numbered(((5, 8), (5, 8))), {"position_ids": positions(numbered(((5, 8),)))}),
    "padding between, mask": (BETWEEN, {"attention_mask": MASK}),
    "padding between, positions": (BETWEEN, {"attention_mask": (MASK != 0).int(), "position_ids": COUNTED}),
    "padding between, columns": (BETWEEN, {"attention_mask": MASK != 0, "position_ids": COLUMNS}),
}
"""For each description: the numbers of the sequences, and arguments of the model."""


WORDS = torch.linspace(-1, 1, 61, dtype=torch.float64)


def outputs_and_gradients(model, tokens, real, **said):
    """Returns the logits of the tokens that are `real`, and the gradients of the parameters."""
    logits = model(tokens, **said).logits[real]
    return logits.detach(), torch.autograd.grad((logits.tanh() @ WORDS).sum(), list(model.parameters()))


@pytest.fixture(scope="module", params=["gla", "hgrn2"])
def model(ours, request):
    torch.manual_seed(0)
    return ours(model_type=request.param, use_short_conv=request.param == "gla").double().train()


@pytest.fixture(scope="module")
def alone(model):
    """A function that returns what the model computes for one sequence, once for each sequence."""

    @functools.cache
    def compute(tokens):
        return outputs_and_gradients(model, torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool))

    return compute


@pytest.mark.parametrize(("numbers", "said"), WAYS.values(), ids=list(WAYS))
def test_each_sequence_is_as_alone(model, alone, numbers, said):
    """All tokens differ, so the gradients of their embeddings are those of the sequences."""
    tokens, real = torch.zeros_like(numbers), numbers != 0
    tokens[real] = torch.arange(1, 1 + int(real.sum()))
    actual, gradients = outputs_and_gradients(model, tokens, real, **said)
    sequences = [
        row[row_numbers == n]
        for row, row_numbers in zip(tokens, numbers, strict=True)
        for n in row_numbers.unique()
        if n
    ]
    expected, parts = zip(*(alone(tuple(sequence.tolist())) for sequence in sequences), strict=True)
    torch.testing.assert_close(actual, torch.cat(expected), **CLOSE)
    torch.testing.assert_close(gradients, tuple(map(sum, zip(*parts, strict=True))), **CLOSE)


@torch.no_grad()
def test_other_outputs_have_the_rows_of_the_batch(model):
    model.eval()
    numbers = numbered(ROWS)
    tokens = torch.randint(1, 61, numbers.shape)
    out = model(tokens, attention_mask=numbers, output_hidden_states=True)
    assert {tuple(x.shape) for x in out.hidden_states} == {(*numbers.shape, 32)}
    embedded = model(inputs_embeds=out.hidden_states[0], position_ids=positions(numbers), use_cache=False)
    assert embedded.past_key_values is None
    torch.testing.assert_close(embedded.logits[numbers != 0], out.logits[numbers != 0], **CLOSE)
    states = out.past_key_values.layers[0].state.recurrent
    assert len(states) == sum(map(len, ROWS))  # a row of the cache for each sequence
    expected = model(tokens[1:2, 9:12]).past_key_values.layers[0].state.recurrent
    torch.testing.assert_close(states[4:5], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 7])
def test_one_sequence_in_each_row_stays_so(model, first):
    """Positions that count tokens or columns pack nothing, so rows keep their mask and their cache."""
    model.eval()
    tokens = torch.randint(1, 61, (2, 9))
    for mask in (torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0], [1] * 9]), None):
        cache = GLACache(model.config)
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        for said in (torch.arange(9)[None], torch.ones_like(tokens).cumsum(1) if mask is None else mask.cumsum(1) - 1):
            cache = GLACache(model.config)
            actual = model(tokens, attention_mask=mask, position_ids=said + first, past_key_values=cache).logits
            assert torch.equal(actual, expected)
            assert len(cache.layers[0].state.recurrent) == 2


NUMBERS = numbered(((2, 4), (6,)))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"attention_mask": NUMBERS, "past_key_values": GLACache},
            "^attention_mask describe.* which the rows of a cache",
        ),
        ({"position_ids": positions(NUMBERS), "past_key_values": GLACache}, "give each sequence a row of its own"),
        ({"seq_idx": NUMBERS, "attention_mask": NUMBERS, "cache": GLACache}, "^seq_idx and attention_mask describe"),
        ({"attention_mask": NUMBERS[:, None, None]}, r"attention_mask is \[2, 1, 1, 6\]; expected \[2, 6 or more\]"),
        ({"attention_mask": {"full_attention": NUMBERS}}, "attention_mask is dict; expected"),
        ({"attention_mask": NUMBERS[:, :5]}, r"attention_mask is \[2, 5\]"),
        ({"position_ids": torch.arange(5)[None]}, r"position_ids is \[1, 5\]; expected \[2, 6\] or \[1, 6\]"),
        ({"position_ids": torch.arange(6).expand(3, 2, 6)}, r"position_ids is \[3, 2, 6\]"),
        ({"seq_idx": torch.arange(6)}, r"seq_idx is \[6\]"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 12]), "attention_mask": NUMBERS},
            "both cu_seq_lens_q and attention_mask",
        ),
    ],
)
def test_what_is_refused(model, said, message):
    said = {name: value(model.config) if value is GLACache else value for name, value in said.items()}
    with pytest.raises(ValueError, match=message):
        model.eval()(torch.ones(2, 6, dtype=torch.long), **said)


def test_generate_reads_no_packed_prompt(model):
    for mask in (NUMBERS, NUMBERS + 1):
        with pytest.raises(ValueError, match="describe packed sequences"):
            model.eval().generate(torch.ones(2, 6, dtype=torch.long), attention_mask=mask, max_new_tokens=2)


def test_compiled_code_reads_no_numbers():
    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def is_packed(mask):
        return mask + (packing.packed({}, mask, mask, with_cache=False)[0] is not None)

    assert torch.equal(is_packed(NUMBERS != 0), NUMBERS != 0)
    assert torch.equal(is_packed((NUMBERS != 0).long()), (NUMBERS != 0).long())
    with pytest.raises(RuntimeError, match=r"attention_mask numbers packed sequences; .*: pass cu_seqlens"):
        is_packed(NUMBERS)


def test_a_mask_of_ones_is_no_mask(model, monkeypatch):
    """`generate` and collators make such masks; calls without a mask take fewer kernels."""
    masks, read = [], GLAModel._read

    def reads(self, words, embedded, mask, *rest):
        masks.append(mask)
        return read(self, words, embedded, mask, *rest)

    monkeypatch.setattr(GLAModel, "_read", reads)
    tokens, mask = torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
    model(tokens, attention_mask=mask)
    mask[0, 0] = 0
    model(tokens, attention_mask=mask)
    assert masks[0] is None
    assert masks[1] is mask
