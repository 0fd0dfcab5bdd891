"""Graphs of decoding on a GPU: what they need of the descriptions of batches, tested on a CPU.

A graph computes again with the tensors that were there at its capture. So the tensors of a batch must be written in
place, and a batch that is captured once must give the results of all later ones.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.compilation import breakable_cudagraph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

import gla_core as gla
from gla_vllm.metadata import ConvolvedGLAMetadataBuilder, GLAMetadataBuilder
from gla_vllm.recurrence import Rows, recur, split_graphs

SEQUENCES, SLOTS, BLOCK, H, K, V = 4, 24, 64, 2, 16, 16
GRAPHS = CUDAGraphMode.FULL_DECODE_ONLY


def builder_of(kind, drafts=0, cached=False, device="cpu", rings=False):
    """Returns a builder of vLLM's engine with CUDA graphs of up to SEQUENCES decodes."""
    config = VllmConfig()
    config.scheduler_config.max_num_seqs = SEQUENCES
    config.compilation_config.cudagraph_mode = GRAPHS
    config.compilation_config.max_cudagraph_capture_size = SEQUENCES * (1 + drafts)
    if drafts:
        config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts)
    cache, mode = config.cache_config, "align" if cached else "none"
    cache.mamba_cache_mode, cache.hash_block_size, cache.cache_hit_alignment_tokens = mode, BLOCK, BLOCK
    spec = MambaSpec(
        block_size=BLOCK,
        shapes=((H, K, V),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.LINEAR,
        mamba_cache_mode=mode,
        num_speculative_blocks=0 if rings else drafts,
        num_prefill_checkpoint_blocks=int(cached),
        prefill_checkpoint_alignment=BLOCK,
    )
    assert kind.get_cudagraph_support(config, spec) == AttentionCGSupport.UNIFORM_BATCH
    return kind(spec, ["layer"], config, torch.device(device))


class Runner:
    """Describes decodes as vLLM's model runner does: offsets stay where they are, and unused rows are padding."""

    def __init__(self, drafts):
        self.tokens, self.offsets = 1 + drafts, torch.zeros(SEQUENCES + 1, dtype=torch.int32)

    def batch(self, slots):
        """Describes decodes whose states are in these slots [N, 1 + drafts], padded to SEQUENCES."""
        n, blocks = len(slots), torch.zeros(SEQUENCES, self.tokens, dtype=torch.int32)
        blocks[:n] = slots
        self.offsets[:] = self.tokens * torch.arange(SEQUENCES + 1).clamp(max=n)
        lengths = torch.where(torch.arange(SEQUENCES) < n, 100, 0)
        return CommonAttentionMetadata(
            query_start_loc=self.offsets,
            query_start_loc_cpu=self.offsets.clone(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=SEQUENCES,
            num_actual_tokens=SEQUENCES * self.tokens,
            max_query_len=self.tokens,
            max_seq_len=100,
            block_table_tensor=blocks,
            slot_mapping=torch.empty(0),
            is_prefilling=torch.zeros(SEQUENCES, dtype=torch.bool),
        )


def tokens_of(rows):
    """Returns random q, k, v and g of as many tokens."""
    return [torch.randn(rows, H, K) for _ in range(3)] + [-torch.rand(rows, H, K)]


def expected(tokens, pool, slots, accepted):
    """Returns the output and the pool after the decodes, computed one token after the other."""
    out, after, count = torch.zeros_like(tokens[2]), pool.clone(), slots.shape[1]
    for n, names in enumerate(slots.tolist()):
        state = pool[names[accepted[n] - 1]][None]
        for i, name in enumerate(names):
            row = n * count + i
            out[row], state = gla.recurrent_gla_step(*(x[row][None] for x in tokens), state)
            after[name] = state
    return out, after


@pytest.mark.parametrize("drafts", [0, 3], ids=["", "drafts"])
def test_a_captured_batch_gives_the_results_of_later_ones(drafts):
    torch.manual_seed(0)
    builder, runner, rows = builder_of(GLAMetadataBuilder, drafts), Runner(drafts), SEQUENCES * (1 + drafts)
    captured = builder.build_for_cudagraph_capture(runner.batch(torch.zeros(SEQUENCES, 1 + drafts)))
    pool = torch.randn(SLOTS, H, K, V)
    before, tokens = pool.clone(), tokens_of(rows)
    recur(Rows(*tokens, torch.empty_like(tokens[2])), [pool], captured, {})
    assert torch.equal(pool, before)  # all rows are padding
    for n in (4, 1, 3):
        tokens = tokens_of(rows)
        slots = 1 + torch.randperm(SLOTS - 1)[: n * (1 + drafts)].view(n, -1)
        accepted = torch.randint(1, 2 + drafts, (SEQUENCES,), dtype=torch.int32)
        out, after = expected(tokens, pool, slots, accepted)
        builder.build(0, runner.batch(slots), **({"num_accepted_tokens": accepted} if drafts else {}))
        actual = torch.full_like(tokens[2], torch.nan)
        recur(Rows(*tokens, actual), [pool], captured, {})
        torch.testing.assert_close(actual, out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool, after, rtol=1e-5, atol=1e-5)


def test_a_captured_batch_says_where_rings_begin():
    """A token is at its place in the sequence modulo 8, twice the tokens of a call; there are 96 before these calls."""
    builder, runner = builder_of(GLAMetadataBuilder, drafts=3, rings=True), Runner(drafts=3)
    captured = builder.build_for_cudagraph_capture(runner.batch(torch.zeros(SEQUENCES, 1)))
    accepted = torch.tensor([1, 3, 2, 4], dtype=torch.int32)
    builder.build(0, runner.batch(torch.ones(SEQUENCES, 1)), num_accepted_tokens=accepted)
    assert captured.ring_start.tolist() == [7, 5, 6, 4]


@pytest.mark.parametrize("kind", [GLAMetadataBuilder, ConvolvedGLAMetadataBuilder])
@pytest.mark.parametrize(("drafts", "decodes"), [([], 4), ([], 2), ([3, 0], 2)], ids=["decodes", "mixed", "drafts"])
def test_no_value_of_the_device_is_read(kind, drafts, decodes):
    """The device is "meta", whose tensors have no values: reading one is an error."""
    lengths = torch.tensor([1 + n for n in drafts or [0] * decodes] + [70, 130][: SEQUENCES - decodes])
    offsets = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
    seen = torch.where(torch.arange(SEQUENCES) < decodes, 100, lengths)
    blocks = torch.empty(SEQUENCES, 8, dtype=torch.int32, device="meta")
    builder = builder_of(kind, max(drafts, default=0), cached=True, device="meta")
    common = CommonAttentionMetadata(
        query_start_loc=offsets.to("meta"),
        query_start_loc_cpu=offsets,
        seq_lens=seen.to("meta"),
        seq_lens_cpu_upper_bound=seen,
        num_reqs=SEQUENCES,
        num_actual_tokens=int(offsets[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=130,
        block_table_tensor=blocks,
        slot_mapping=torch.empty(0, device="meta"),
        is_prefilling=torch.arange(SEQUENCES) >= decodes,
    )
    counts = torch.tensor([*drafts, -1, -1], dtype=torch.int32)
    draft_options = {"num_accepted_tokens": blocks[:, 0], "num_decode_draft_tokens_cpu": counts} if drafts else {}
    batch = builder.build(0, common, **draft_options)
    for described in (batch, builder.update_block_table(batch, blocks, common.slot_mapping)):
        assert (described.num_decodes, described.num_prefills) == (decodes, SEQUENCES - decodes)
        assert described.state_indices_tensor_d.is_meta
        assert (described.checkpoint is None) == (described.num_prefills == 0)


OURS = ["vllm::gla_convolution", "vllm::gla_recurrence"]


@pytest.mark.parametrize(("before", "after"), [(["vllm::mamba_mixer2"], ["vllm::mamba_mixer2", *OURS]), ([], [])])
def test_compiled_graphs_stop_at_the_ops(before, after):
    """Two layers of a model say so. Without vLLM's ops, graphs do not stop at all."""
    config = VllmConfig()
    config.compilation_config.splitting_ops = before
    for _ in range(2):
        split_graphs(config)
    assert config.compilation_config.splitting_ops == after


def test_breakable_graphs_stop_at_the_ops(monkeypatch):
    """A graph that is captured notes the op, and calls it at each replay; nothing is computed before."""
    noted = []
    capture = SimpleNamespace(_capturing=True, add_eager=noted.append)
    monkeypatch.setattr(BreakableCUDAGraphCapture._tls, "active", capture, raising=False)
    monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensor", lambda x: x)  # of vLLM's CUDA library
    x, out = torch.randn(5, H, K), torch.full((5, H, V), torch.nan)
    with set_forward_context(None, VllmConfig()):
        torch.ops.vllm.gla_recurrence(x, x, x, -x.abs(), None, out, "layer")
        torch.ops.vllm.gla_convolution(x[:, 0], x[0, 0, :, None], out[:, 1], False, "layer")
        assert out.isnan().all()
        for call in noted:
            call()
    assert len(noted) == 2
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("batches", [None, {}], ids=str)
def test_a_layer_without_a_batch_gives_zeros(batches):
    """Before there are states, vLLM measures memory. It then describes no batch, or those of other layers alone."""
    x, out = torch.randn(5, H, K), torch.full((5, H, V), torch.nan)
    with set_forward_context(batches, VllmConfig()):
        torch.ops.vllm.gla_recurrence(x, x, x, -x.abs(), None, out, "layer")
    assert torch.equal(out, torch.zeros_like(out))
