"""Calls that are replayed: from the second call on, results are the same, and profilers still see every launch."""

import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import gla_core as gla
from tests.backends.fake_driver import GRID, TYPES, compiled, install, launch, record, record_two, tensor, two_launches

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.backends.nvidia import driver

import gla_triton_kernels
from gla_core.workloads.inputs import gla_inputs
from gla_triton_runtime import prepared, replay
from gla_triton_runtime.prepared import Launches
from gla_triton_runtime.tma import tiles


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch)


def again(recorded, x, y):
    return replay.replay(recorded, (x, None, y), (0.5,))


# ---- records, on a fake device that only notes launches


def test_a_kernel_is_told_what_triton_would_tell_it(gpu):
    x, y = tensor(), tensor()
    recorded, first = record(gpu, x, y)
    for _ in range(3):
        assert again(recorded, x, y)
    assert gpu.launched == [first] * 3
    other = tensor()
    recorded, expected = record(gpu, other, x)
    assert again(recorded, other, x)
    assert gpu.launched[3:] == [expected] != [first]


def test_a_map_is_encoded_once_for_an_address(gpu):
    x, y, other = tensor(), tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    gpu.encoded.clear()
    for each in (x, x, other, x.clone().set_(x), other, x):  # pyright: ignore
        assert again(recorded, each, y)
    outputs = [tensor() for _ in range(3)]
    for output in outputs:
        assert again(recorded, x, output)
    assert gpu.encoded == [x.data_ptr(), other.data_ptr()]


def test_maps_of_other_shapes_at_the_same_address_are_others(gpu):
    """Memory may be freed and allocated again for a tensor of another shape."""
    x, y = tensor(), tensor()
    shorter = x.view(-1)[: 2 * 4 * 3 * 8].view(2, 4, 3, 8)
    assert shorter.data_ptr() == x.data_ptr()
    (longer, first), (other, second) = record(gpu, x, y), record(gpu, shorter, y)
    told = [first, second]
    assert again(longer, x, y)
    assert again(other, shorter, y)
    assert gpu.launched == told
    assert told[0] != told[1]


def test_maps_are_few_and_hold_no_tensors(gpu, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_MAPS", 3)
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    others = [tensor() for _ in range(20)]
    for other in others:
        assert again(recorded, other, y)
        assert 0 < encoded_maps(recorded) <= 3
    assert again(recorded, x, y)
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_what_is_not_launched_again(gpu):
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    assert not again(recorded, torch.zeros(800)[1:769].view(2, 16, 3, 8), y)
    gpu.index = 1
    assert not again(recorded, x, y)
    assert not gpu.launched


def test_an_index_may_lie_at_any_address(gpu):
    def called(x, index):
        made = [launch(GRID, {"x_ptr": x, "index_ptr": index, "T": 1}, compiled(gpu, "*fp32", "*i32", "i32"))]
        return replay.record((x, index), made)

    x, index = tensor(), torch.zeros(9, dtype=torch.int32)
    recorded = called(x, index[1:])
    assert replay.replay(recorded, (x, index[2:]), ())
    assert gpu.launched[0][-3:-1] == [x.data_ptr(), index[2:].data_ptr()]
    assert not replay.replay(recorded, (x.view(-1)[1:], index), ())
    assert called(x.view(-1)[1:], index) is None


def test_a_triton_that_launches_otherwise(gpu, monkeypatch):
    def encoding(launch, *_):
        return lambda *args: launch(*args)

    replay._launchers_are_known.cache_clear()
    monkeypatch.setattr(driver, "wrap_handle_tensordesc", encoding)
    assert "launches kernels in another way" in replay.why_not_replayed()
    assert record(gpu, tensor(), tensor())[0] is None
    monkeypatch.undo()
    replay._launchers_are_known.cache_clear()
    assert replay.why_not_replayed() is None


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.1", True), ("3.7.1+git", True), ("3.8.0", True), ("3.5.0", False), ("3.10", False)]
)
def test_launchers_are_known_by_the_version_of_triton(monkeypatch, version, known):
    monkeypatch.setattr(triton, "__version__", version)
    for cached in (replay._launcher, replay._launchers_are_known):
        cached.cache_clear()
    try:
        assert replay._launchers_are_known() == known
    finally:
        for cached in (replay._launcher, replay._launchers_are_known):
            cached.cache_clear()


@pytest.mark.parametrize(("setting", "on"), [(None, True), ("1", True), ("0", False), (" Off ", False)])
def test_graphs_may_be_turned_off(monkeypatch, setting, on):
    monkeypatch.delenv("GLA_GRAPHS", raising=False)
    if setting is not None:
        monkeypatch.setenv("GLA_GRAPHS", setting)
    replay.graphs_are_on.cache_clear()
    try:
        assert replay.graphs_are_on() == on
    finally:
        replay.graphs_are_on.cache_clear()


def test_what_is_said_of_interpreted_kernels(monkeypatch):
    assert gla_triton_kernels.notes() == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (note,) = gla_triton_kernels.notes()
    assert note.endswith("kernels are interpreted (TRITON_INTERPRET=1)")


def encoded_maps(*recorded):
    """Returns the number of tensor maps that are kept for recorded calls."""
    launches = [launch for call in recorded for launch in call.launches]
    return sum(len(tensor_map.encoded) for launch in launches for tensor_map in launch.maps if tensor_map)


def test_a_call_of_several_launches(gpu):
    x, y, scratch = tensor(), tensor(), torch.empty(3, 5, dtype=torch.float64)
    recorded = record_two(gpu, x, y, scratch)
    assert replay.replay(recorded, (y, x), (0.25,))
    (first_grid, *first), (second_grid, *second) = gpu.launched
    handed_over = first[-3]
    assert handed_over not in (0, x.data_ptr(), y.data_ptr(), scratch.data_ptr())
    assert (first_grid, first[-4:]) == (5, [y.data_ptr(), handed_over, 1, 2])
    assert (second_grid, second[-4:]) == (6, [handed_over, x.data_ptr(), 0.25, 3])


def test_launches_are_told_of_the_addresses_and_floats_of_their_call(gpu, monkeypatch):
    """A replay uses nothing of earlier calls. Each call allocates scratch, here at one of two addresses in turn."""
    x, y, z = (tensor() for _ in range(3))
    recorded = record_two(gpu, x, y, tensor())
    calls = [(x, y, 0.5), (y, x, 0.5), (x, y, 0.25), (x, z, 0.25), (z, y, 0.5)]
    for memory, (a, b, scale) in zip(itertools.cycle([tensor(), tensor()]), 4 * calls, strict=False):
        monkeypatch.setattr(torch, "UntypedStorage", lambda *_, memory=memory, **__: memory)
        assert replay.replay(recorded, (a, b), (scale,))
        first, second = gpu.launched[-2:]
        assert first[-4:] == [a.data_ptr(), memory.data_ptr(), 1, 2]
        assert second[-4:] == [memory.data_ptr(), b.data_ptr(), scale, 3]
    assert len(gpu.launched) == 2 * 4 * len(calls)


def replay_two(recorded, x, y, scratch, monkeypatch):
    """Replays a call of two launches. The memory for scratch is always the given tensor."""
    monkeypatch.setattr(torch, "UntypedStorage", lambda *_, **__: scratch)
    assert replay.replay(recorded, (x, y), (0.5,))


def test_launches_that_are_made_again_and_again_become_a_graph(gpu, monkeypatch):
    x, y, scratch = (tensor() for _ in range(3))
    recorded = record_two(gpu, x, y, scratch)
    for _ in range(10):
        replay_two(recorded, x, y, scratch, monkeypatch)
    (graph,) = gpu.graphs
    assert graph.starts == 6
    assert gpu.launched == 10 * gpu.launched[:2]
    replay_two(recorded, y, x, scratch, monkeypatch)  # other addresses
    assert graph.starts == 6


def test_one_launch_needs_no_graph(gpu):
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    assert all(again(recorded, x, y) for _ in range(10))
    assert not gpu.graphs


def test_where_no_graph_can_be_made_launches_go_on_one_by_one(gpu, monkeypatch):
    def out_of_memory(launch):
        raise RuntimeError

    monkeypatch.setattr(replay, "Graph", out_of_memory)
    x, y, scratch = (tensor() for _ in range(3))
    recorded = record_two(gpu, x, y, scratch)
    for _ in range(10):
        replay_two(recorded, x, y, scratch, monkeypatch)
    assert gpu.launched == 10 * gpu.launched[:2]


def test_a_capture_is_told_of_every_launch(gpu, monkeypatch):
    x, y, scratch = (tensor() for _ in range(3))
    recorded = record_two(gpu, x, y, scratch)
    expected = [(True, 0, 0)] * 5 + [(False, 0, 0)] * 3
    expected += [(False, 1, 0), (False, 1, 1), (True, 1, 1), (False, 1, 2)]
    for capturing, graphs, starts in expected:
        gpu.capturing = capturing
        replay_two(recorded, x, y, scratch, monkeypatch)
        assert (len(gpu.graphs), sum(graph.starts for graph in gpu.graphs)) == (graphs, starts)
    assert gpu.launched == len(expected) * gpu.launched[:2]


def test_graphs_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_GRAPHS", 3)
    x, y, *others = (tensor() for _ in range(7))
    recorded = record_two(gpu, x, y, tensor())
    for other, _ in itertools.product(others, range(6)):
        replay_two(recorded, x, y, other, monkeypatch)
        assert len(replay._graphed) == sum(kept.graph is not None for kept in replay._prepared.values()) <= 3
    assert len(gpu.graphs) == len(others) == 5
    for replays in range(1, 65):  # these launches' graph was dropped
        replay_two(recorded, x, y, others[0], monkeypatch)
        assert len(gpu.graphs) == 5 + (replays == 64)


def test_launches_of_a_graph_that_the_driver_refuses_go_on_one_by_one(gpu, monkeypatch):
    x, y, scratch = (tensor() for _ in range(3))
    recorded = record_two(gpu, x, y, scratch)
    for _ in range(5):
        replay_two(recorded, x, y, scratch, monkeypatch)
    (graph,) = gpu.graphs

    def refused(_stream):
        graph.starts += 1
        raise RuntimeError("cuGraphLaunch of the CUDA driver returned error 2")

    monkeypatch.setattr(graph, "start", refused)
    graph.starts = 0
    for _ in range(100):
        replay_two(recorded, x, y, scratch, monkeypatch)
    assert gpu.launched == 105 * gpu.launched[:2]
    assert (graph.starts, len(gpu.graphs), replay._graphed) == (1, 1, [])


def test_a_graph_that_is_made_while_others_are_dropped_is_not_lost(gpu, monkeypatch):
    """One thread makes one graph too many and drops old ones. Before it clears its list, another makes a graph."""

    def made(prepared):
        while prepared.graph is None:
            prepared.start(7)

    class Graphed(list):
        def clear(self):
            monkeypatch.setattr(replay, "_MOST_GRAPHS", 9)
            beside.start()
            beside.join(0.2)  # the other thread may wait for this one
            super().clear()

    monkeypatch.setattr(replay, "_MOST_GRAPHS", 1)
    monkeypatch.setattr(replay, "_graphed", Graphed())
    first, second, third = (replay._Prepared(2 * [(gpu.launch, GRID, ())]) for _ in range(3))
    beside = threading.Thread(target=made, args=(third,))
    made(first)
    made(second)
    beside.join()
    assert [x.graph is not None for x in (first, second, third)] == [False, True, True]
    assert sorted(map(id, replay._graphed)) == sorted(map(id, (second, third)))


def test_nothing_is_replayed_on_an_amd_gpu(gpu, monkeypatch):
    """An AMD GPU has other launchers, and the code does not even look at them."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    assert replay.why_not_replayed() == "launches are replayed on NVIDIA GPUs alone"
    x, y = tensor(), tensor()
    made = launch(GRID, {"x_ptr": x, "y_ptr": y, "scale": 0.5}, SimpleNamespace(run=object()))
    assert replay.record((x, y), [made]) is None


def test_a_call_that_is_recorded_anew_forgets_what_was_told(gpu):
    def call():
        if unrecorded := launches.replay((x, y), 0.5):
            arguments = {"x_desc": tiles(x, 8, 8), "absent": None, "y_ptr": y, "scale": 0.5, "T": 9}
            one = [launch(GRID, arguments, compiled(gpu, *TYPES))]
            unrecorded.start(two_launches(gpu, x, y, tensor(), 0.5) if gpu.index == 1 else one)

    x, y, launches = tensor(), tensor(), Launches(torch.device("cpu"))
    for _ in range(2):
        call()
    assert len(gpu.launched) == 2
    gpu.index = 1
    call()
    gpu.launched.clear()
    call()
    assert len(gpu.launched) == 2


def test_the_stream_is_asked_for_by_every_call(gpu):
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    for gpu.stream in (7, 8, 7):
        assert again(recorded, x, y)
    assert [launched[3] for launched in gpu.launched] == [7, 8, 7]


def test_a_kept_call_is_not_launched_on_another_device_or_past_a_profiler(gpu, monkeypatch):
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    assert again(recorded, x, y)
    gpu.index = 1
    assert not again(recorded, x, y)
    gpu.index = 0
    monkeypatch.setattr(replay, "_profiled", lambda: True)
    assert not again(recorded, x, y)
    assert len(gpu.launched) == 1


def test_addresses_that_are_not_aligned_are_refused_every_time(gpu):
    x, y = tensor(), tensor()
    recorded, _ = record(gpu, x, y)
    odd = torch.zeros(800)[1:769].view(2, 16, 3, 8)
    assert [again(recorded, each, y) for each in (x, odd, odd, x)] == [True, False, False, True]


def test_what_is_kept_of_launches_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_PREPARED", 3)
    tensors = [tensor() for _ in range(8)]
    x, y, *_ = tensors
    calls = [record(gpu, x, y)[0] for _ in range(2)]
    for recorded, output in itertools.product(calls, tensors[1:]):
        assert again(recorded, x, output)
        assert 0 < len(replay._prepared) <= 3
        assert gpu.launched[-1][-3:] == [output.data_ptr(), 0.5, 9]


@pytest.mark.parametrize("launcher", ["TRITON_3_6", "TRITON_3_7", "TRITON_3_8"])
def test_either_form_of_launchers(gpu, monkeypatch, launcher):
    """Triton's launcher in C takes the kernel's arguments one by one in version 3.6, and as a tuple later."""
    monkeypatch.setattr(replay, "_launcher", lambda: getattr(replay, launcher))
    launched = []
    gpu.launch = lambda *args: launched.append(args)
    x, y = tensor(), tensor()
    arguments = {"x_ptr": x, "absent": None, "y_ptr": y, "scale": 0.5, "T": 9}
    made = launch(GRID, arguments, compiled(gpu, "*fp32", "*fp32"))
    recorded = replay.record((x, None, y), [made])
    for _ in range(2):
        assert again(recorded, x, y)
    arguments = (x.data_ptr(), 0, y.data_ptr(), 0.5, 9)
    for args in launched:
        assert args[:7] == (*GRID, 7, "kernel", False, True)
        assert args[-5:] == arguments if launcher == "TRITON_3_6" else args[-1] == arguments


def test_parts_of_tensors_are_where_they_were(gpu):
    x, y, scratch = tensor(), tensor(), torch.empty(2, 8, dtype=torch.float64)
    kernel = compiled(gpu, *TYPES)
    tensors = (tiles(replay.part(x, 1, 2), 8, 8), replay.part(y, 1, 2), replay.part(scratch, 1, 2))
    first_arguments = {"x_desc": tensors[0], "absent": None, "y_ptr": tensors[1], "scale": 0.5, "T": 9}
    made = launch(GRID, first_arguments, kernel)
    other_arguments = {"scratch_ptr": tensors[2], "y_ptr": tensors[1], "scale": 0.5, "T": 9}
    other = launch(GRID, other_arguments, compiled(gpu, "*fp64", "*fp32"))
    recorded = replay.record((x, y), [made, other])
    gpu.encoded.clear()
    new = tensor(), tensor()
    assert replay.replay(recorded, new, (0.25,))
    row_bytes = x[0].nbytes
    assert gpu.encoded == [new[0].data_ptr() + row_bytes]
    (_, *first), (_, *second) = gpu.launched
    assert first[-3:] == [new[1].data_ptr() + row_bytes, 0.25, 9]
    assert second[-3:] == [new[1].data_ptr() + row_bytes, 0.25, 9]
    assert second[-4] not in (scratch.data_ptr() + 64, 0)


def test_calls_that_cannot_be_told_apart_are_not_recorded(gpu):
    """It must be clear which of the call's tensors a launch takes, and that other tensors may be allocated again."""
    x, y = tensor(), tensor()
    assert record_two(gpu, x, x, tensor()) is None
    assert record_two(gpu, x, y, tensor().mT) is None
    assert record_two(gpu, x, y, y.view(-1)) is None
    z = tensor()
    for other, recorded in ((z.view(-1), False), (z[1], False), (tensor(), True)):
        launches = [launch(GRID, {"x_ptr": each, "T": 9}, compiled(gpu, "*fp32")) for each in (z, other)]
        assert (replay.record((x, y), launches) is not None) == recorded
    assert replay.replay(record_two(gpu, x, y, tensor()), (x, x), (0.5,))


@pytest.mark.parametrize("last", ["a tensor", "a descriptor", "a float"])
def test_kernels_that_end_with_tensors_or_floats_are_not_recorded(gpu, last):
    """Their values differ from call to call, but the record would treat them as fixed."""
    x, y = tensor(), tensor()
    value = {"a tensor": y, "a descriptor": tiles(y, 8, 8), "a float": 0.25}[last]
    for arguments, recorded in (({"x_ptr": x, "T": 9}, True), ({"x_ptr": x, "T": 9, "last": value}, False)):
        call = replay.record((x, y), [launch(GRID, arguments, compiled(gpu, "*fp32"))])
        assert (call is not None) == recorded
        assert call is None or replay.replay(call, (x, y), (0.5,))


@pytest.fixture
def heard():
    """Listens to Triton's launches, as a profiler does, and returns a list with an entry for each."""
    calls = []

    def note(*_):
        calls.append(1)

    knobs.runtime.launch_enter_hook.add(note)
    yield calls
    knobs.runtime.launch_enter_hook.remove(note)


def test_nothing_is_launched_past_a_profiler(gpu, heard):
    assert replay.why_not_replayed() == "a profiler listens to Triton's launches"
    assert record(gpu, tensor(), tensor())[0] is None


# ---- on a GPU


@pytest.mark.gpu
def test_the_second_call_gives_what_the_first_gave():
    x = torch.randn(64, 1000, device="cuda")
    first, second, third = (gla.online_softmax(x + i, backend="triton_fused") for i in (0, 0, 1))
    assert torch.equal(first, second)
    assert torch.equal(third, gla.online_softmax(x + 1, backend="triton_fused"))
    torch.testing.assert_close(third, torch.softmax(x + 1, -1))


@pytest.mark.gpu
def test_another_stream():
    x = torch.randn(64, 1000, device="cuda")
    gla.online_softmax(x, backend="triton_fused")
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(10_000_000)
        y = x * 2
        actual = gla.online_softmax(y, backend="triton_fused")
    aside.synchronize()
    torch.testing.assert_close(actual, torch.softmax(2 * x, -1))


@pytest.mark.gpu
def test_profilers_hear_of_every_launch(heard):
    x = torch.randn(64, 1001, device="cuda")
    for _ in range(3):
        gla.online_softmax(x, backend="triton_fused")
    assert len(heard) == 3


def chunk_inputs(T, seed):
    torch.manual_seed(seed)
    x = gla_inputs(B=2, T=T, H=2, K=128, V=128, dtype=torch.bfloat16, device="cuda", initial_state=True)
    return x.q, x.k, x.v, x.g, None, x.initial_state, True


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton_fused", "parallel_scan"])
def test_tensor_maps_follow_their_tensors(backend, monkeypatch):
    """Freed memory is reused by tensors of other shapes. Replayed launches give the same results as new launches."""
    calls = [(T, seed) for T in (1024, 640, 1024, 512) for seed in range(3)]
    with gla.use_backend(backend):
        actual = [gla.chunk_gla(*chunk_inputs(*call)) for call in calls * 2]
        assert encoded_maps(*{recorded for recorded, *_ in replay._prepared}) > 0
        monkeypatch.setattr(prepared, "replay", lambda *_: False)
        for i, call in enumerate(calls):
            new_results = gla.chunk_gla(*chunk_inputs(*call))
            for once, twice, new in zip(actual[i], actual[i + len(calls)], new_results, strict=True):
                assert torch.equal(once, new)
                assert torch.equal(twice, new)


@pytest.mark.gpu
def test_profilers_hear_of_kernels_with_tensor_maps(heard):
    x = chunk_inputs(1024, 0)
    heard.clear()
    for _ in range(3):
        gla.chunk_gla(*x, backend="triton_fused")
    assert len(heard) == 3


@pytest.mark.gpu
def test_a_captured_launch_keeps_its_maps():
    x = chunk_inputs(1024, 0)
    expected = gla.chunk_gla(*x, backend="triton_fused")[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual, _ = gla.chunk_gla(*x, backend="triton_fused")
    for i in range(50):  # calls outside of the graph replace the kept maps
        gla.chunk_gla(*chunk_inputs(1024, i), backend="triton_fused")
    actual.zero_()
    graph.replay()
    assert torch.equal(actual, expected)
