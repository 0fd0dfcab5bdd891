"""benchmarks/models.py on a small model on a CPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
pytest.importorskip("gla_transformers", reason="needs the plugin: make test-fla")


@pytest.fixture
def models(script):
    return script("models")


def test_rows(models, tmp_path):
    models.main(["--device", "cpu", "--out", str(tmp_path), "--ways", "accelerated,ours,graph", "--commit", "here"])
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    kinds = [
        ("train", "accelerated"),
        ("train", "ours"),
        *(("generate", way) for way in ("accelerated", "ours", "graph")),
    ]
    assert [(row["what"], row["way"]) for row in found["rows"]] == kinds
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])
    assert found["commit"] == "here"


def test_kernels_of_gated_linear_attention(models):
    ours = ("_chunk_gla_fwd_kernel", "_scan_kernel", "_pairs_kernel", "_state_kernel", "_build_states_kernel")
    theirs = ("chunk_gla_fwd_A_kernel_intra_sub_inter", "chunk_fwd_kernel_h", "chunk_local_cumsum_vector_kernel")
    others = ("triton_red_fused_chunk_gla_fwd_mul_3", "nvjet_tst_128x256", "elementwise_kernel")
    assert all(models.OF_GLA.match(name) for name in ours + theirs)
    assert not any(models.OF_GLA.match(name) for name in others)
