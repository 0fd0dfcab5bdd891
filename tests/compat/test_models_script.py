"""benchmarks/models.py with a small model on a CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
pytest.importorskip("gla_transformers", reason="needs the plugin: make test-fla")

CPU = torch.device("cpu")


@pytest.fixture
def models(script):
    return script("models")


@pytest.mark.parametrize("what", ["train", "length", "generate", "graph"])
@pytest.mark.parametrize("way", ["accelerated", "ours"])
def test_rows(models, what, way):
    task = models.Task(what, way, 70 if what == "length" else 2)
    row = models.measure(task, CPU)
    assert (row["what"], row["way"], row["size"], row["tokens"]) == (*task, 70)
    assert row["seconds"] > 0
    tokens = {"train": 140, "length": 70}.get(what, 2)
    assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
    assert row["spread"] >= 0


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


def test_rows_of_the_readme_are_measured_first(models):
    tasks = models.tasks(torch.device("cuda"))
    assert len(set(tasks)) == len(tasks)
    lengths = [i for i, task in enumerate(tasks) if task.what == "length"]
    assert {task[:2] for task in tasks[: lengths[0]]} == {
        *(("train", way) for way in ("fla", "accelerated", "compiled")),
        *(("generate", way) for way in ("fla", "ours")),
        *(("graph", way) for way in ("fla", "accelerated", "ours")),
    }


def test_kernels_of_gated_linear_attention(models):
    ours = ("_chunk_gla_fwd_kernel", "_scan_kernel", "_pairs_kernel", "_state_kernel", "_build_states_kernel")
    theirs = ("chunk_gla_fwd_A_kernel_intra_sub_inter", "chunk_fwd_kernel_h", "chunk_local_cumsum_vector_kernel")
    others = ("triton_red_fused_chunk_gla_fwd_mul_3", "nvjet_tst_128x256", "elementwise_kernel")
    assert all(models.OF_GLA.match(name) for name in ours + theirs)
    assert not any(models.OF_GLA.match(name) for name in others)
