"""Checks for two GPUs: compiled kernels in bfloat16, steps in a CUDA graph, and a host that never waits."""

import copy
import itertools
from unittest import mock

import chunk_gla_checks
import delta_rule_checks
import layer_checks
import torch
import torch.distributed as dist
from chunk_gla_checks import Batch
from ranks import rows_of_rank
from torch.distributed.device_mesh import init_device_mesh

from gla_core import distributed
from gla_core.conformance.test_cuda import without_waiting
from gla_core.conformance.tolerances import GRADIENT, relative_error
from gla_core.distributed import exchange
from gla_core.nn import GatedLinearAttention
from gla_core.workloads.inputs import gla_inputs

BF16 = GRADIENT[torch.bfloat16]


def inputs(ranks, **sizes):
    """Returns inputs in bfloat16, with gates in float32."""
    types = {"dtype": torch.bfloat16, "gate_dtype": torch.float32, "device": ranks.device}
    return gla_inputs(H=2, G=2, K=64, V=64, **types, **sizes)


def check_kernels(ranks):
    """Kernels agree with one GPU that has all tokens, and with the reference in float64; a rank may have no token."""
    rows, packed, long = {"B": 2, "T": 400}, {"lengths": (90, 0, 270, 40)}, {"B": 1, "T": 4096}
    for sizes, lengths, layout in (
        (rows, (200, 200), "contiguous"),
        (rows, (130, 270), "contiguous"),
        (rows, (200, 200), "zigzag"),
        (long, (1536, 2560), "contiguous"),
        (long, (2048, 2048), "zigzag"),
        (packed, (130, 270), "contiguous"),
        (packed, (400, 0), "contiguous"),
        (packed, (0, 400), "zigzag"),
        (packed, (150, 250), "zigzag"),
    ):
        batch = Batch(inputs(ranks, initial_state=True, **sizes), lengths, layout)
        chunk_gla_checks.compare(ranks, batch, 2 * BF16)
        chunk_gla_checks.compare(ranks, batch, 2 * BF16, exact=True)
        batch = Batch(inputs(ranks, **sizes), lengths, layout, final_state=False)
        chunk_gla_checks.compare(ranks, batch, 2 * BF16, exact=True)


def check_a_layer(ranks):
    """With bfloat16 parameters, the error over ranks is not much larger than the error on one GPU."""
    torch.manual_seed(0)
    sizes = {"num_heads": 2, "expand_k": 1.0, "use_short_conv": True}
    alone = GatedLinearAttention(128, **sizes, device=ranks.device, dtype=torch.bfloat16)
    exact = copy.deepcopy(alone).double()
    spread = copy.deepcopy(alone)
    spread.context_parallel = init_device_mesh(ranks.device.type, (ranks.number,))
    x, dy = torch.randn(2, 1, 400, 128, device=ranks.device, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 90, 90, 360, 400], device=ranks.device)

    def results(layer, sharded):
        def local(z):
            return rows_of_rank(z, ranks.rank, (130, 270), "contiguous")

        z = (local(x) if sharded else x).detach().to(layer.o_proj.weight.dtype).requires_grad_()
        y, _ = layer(z, cu_seqlens=cu_seqlens)
        y.backward((local(dy) if sharded else dy).to(y.dtype))
        gradients = {name: p.grad.double() for name, p in layer.named_parameters()}
        if sharded:
            for gradient in gradients.values():
                dist.all_reduce(gradient)
            return {"y": y, "x": z.grad, **gradients}
        return {"y": local(y), "x": local(z.grad), **gradients}

    reference = results(exact, False)
    on_one, actual = results(alone, False), results(spread, True)
    for name, ref in reference.items():
        error, bound = relative_error(actual[name], ref), 2 * relative_error(on_one[name], ref) + BF16
        assert error <= bound < 0.1, f"{name}: {error:.3g}, bound {bound:.3g}"


def check_steps_in_a_graph(ranks):
    """Making a shard, the forward and the backward never wait, and a replay takes other tokens and offsets."""
    lengths = (200, 200)
    batches = [inputs(ranks, lengths=cut, seed=seed) for seed, cut in enumerate(((90, 0, 270, 40), (10, 290, 20, 80)))]
    for most_gathered, layout in itertools.product((exchange.MOST_GATHERED, 0), ("contiguous", "zigzag")):
        tokens = [
            [rows_of_rank(y, ranks.rank, lengths, layout) for y in (x.q, x.k, x.v, x.g, x.q[..., : x.v.shape[-1]])]
            for x in batches
        ]
        static, offsets = [y.clone() for y in tokens[0]], batches[0].cu_seqlens.clone()
        leaves, do = [y.requires_grad_() for y in static[:4]], static[4]

        def step(offsets=offsets, leaves=leaves, do=do, layout=layout):
            cut = distributed.shard(200, offsets, layout=layout, lengths=lengths)
            o, _ = distributed.chunk_gla(*leaves, shard=cut)
            return o.detach(), *torch.autograd.grad(o, leaves, do)

        with mock.patch.object(exchange, "MOST_GATHERED", most_gathered):
            without_waiting(step)
            expected = [y.clone() for y in step()]
            again = captured(step)
            with torch.no_grad():
                for y, new in zip((*static, offsets), (*tokens[1], batches[1].cu_seqlens), strict=True):
                    y.copy_(new)
            actual = again()
            assert relative_error(actual[0], expected[0]) > 0.5
            for y, ref in zip(actual, step(), strict=True):
                assert relative_error(y, ref) <= BF16


def captured(step):
    """Captures a step in a CUDA graph; returns a function that replays it once, copies its results, and frees it.

    A process group cannot end while a graph holds its collectives.
    """
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    # NCCL's watchdog thread may query the device while this thread captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()

    def again():
        graph.replay()
        actual = [y.clone() for y in results]
        torch.cuda.synchronize()
        graph.reset()
        return actual

    return again


CHECKS = (
    chunk_gla_checks.check_random_batches,
    chunk_gla_checks.check_random_batches_by_a_scan,
    chunk_gla_checks.check_ranks_that_differ,
    delta_rule_checks.check_random_batches_of_a_delta_rule,
    layer_checks.check_layers_of_random_batches,
    layer_checks.check_a_layer_with_a_mesh,
    check_kernels,
    check_a_layer,
    check_steps_in_a_graph,
)
