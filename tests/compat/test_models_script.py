"""benchmarks/models.py with a small model on a CPU."""

import pytest
import torch

pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
pytest.importorskip("gla_transformers", reason="needs the plugin: make test-fla")

CPU = torch.device("cpu")


@pytest.fixture
def models(script):
    return script("models")


@pytest.mark.parametrize("what", ["train", "generate", "graph"])
@pytest.mark.parametrize("way", ["accelerated", "ours"])
def test_rows(models, what, way):
    task = models.Task(what, way, 2, 70)
    (row,) = models.measure(task, CPU)
    assert row["seconds"] > 0
    assert row["spread"] >= 0
    tokens = {"train": 140}.get(what, 2)
    assert row["facts"]["tokens/s"] == pytest.approx(tokens / row["seconds"])


@pytest.mark.parametrize("way", ["fla", "ours"])
def test_steps_of_a_graph_decode_the_words_of_generate(models, way):
    new = 2 * models.PER_GRAPH + 1
    with models.model_of(way, CPU) as model, torch.no_grad():
        model.eval()
        words = models.tokens_of(3, 70, CPU)
        expected = model.generate(words, min_new_tokens=new, max_new_tokens=new, do_sample=False)[:, 70:]
        decoding = models.Decoding(way, model, words)
        for _ in range(2):  # the second time from existing states
            decoding.start()
            assert torch.equal(decoding.word, expected[:, :1])
            homes = [home.data_ptr() for home in decoding.homes]
            for last in (models.PER_GRAPH, 2 * models.PER_GRAPH):
                decoding.steps()
                assert torch.equal(decoding.word, expected[:, last : last + 1])
            layers = zip(homes, decoding.cache.layers, strict=way == "fla")
            assert all(layer.state["recurrent_state"].data_ptr() == home for home, layer in layers)


def test_rows_are_compared_with_the_same_task_of_fla(models):
    rows = {(call, who): baseline for job in models.jobs(torch.device("cuda")) for call, who, baseline in job.rows}
    assert len(rows) == len(models.tasks(torch.device("cuda")))
    assert all((call, "fla") in rows for (call, _), baseline in rows.items() if baseline)
    assert rows["training step, 8 x 2048 tokens", "gla_transformers, compiled"] == "fla"
    assert rows["decoding in a CUDA graph, 8 sequences", "gla_transformers"] == "fla"


def test_kernels_of_gated_linear_attention(models):
    ours = ("_gla_forward_kernel", "_scan_kernel", "_pairs_kernel", "_state_kernel", "_build_states_kernel")
    theirs = ("chunk_gla_fwd_A_kernel_intra_sub_inter", "chunk_fwd_kernel_h", "chunk_local_cumsum_vector_kernel")
    others = ("triton_red_fused_chunk_gla_fwd_mul_3", "nvjet_tst_128x256", "elementwise_kernel")
    assert all(models.GLA_KERNELS.match(name) for name in ours + theirs)
    assert not any(models.GLA_KERNELS.match(name) for name in others)
