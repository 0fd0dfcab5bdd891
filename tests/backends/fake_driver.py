"""A fake device that notes its launches: tests record and replay calls on it, without a GPU."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

GRID = (3, 2, 1)
TYPES = ("tensordesc<fp32[1,1,8,8]>", "constexpr", "*fp32", "fp32", "i32")
"""Types of the arguments of a kernel that takes a tensor map, None, a tensor, a float and an integer."""


class Device:
    """Takes the place of Triton's driver: tensor maps are tuples, and launches are noted."""

    def __init__(self) -> None:
        self.index, self.stream = 0, 7
        self.encoded, self.launched = [], []
        self.capturing, self.graphs = False, []
        self.utils = SimpleNamespace(fill_tma_descriptor=self.encode, fill_tma_descriptor_tiled=self.encode)

    def encode(self, address: int, *form: Any) -> tuple[int, str]:
        self.encoded.append(address)
        return (address, repr(form))

    def get_current_stream(self, index: int) -> int:
        return self.stream

    def graph(self, launch: Callable[[int], None]) -> SimpleNamespace:
        """Takes the place of a CUDA graph."""
        graph = SimpleNamespace(starts=0)

        def start(stream: int) -> None:
            graph.starts += 1
            launch(stream)

        graph.start = start
        self.graphs.append(graph)
        return graph

    def launch(self, *args: Any) -> None:
        *before, last = args
        self.launched.append([*before, *(last if isinstance(last, tuple | list) else [last])])


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Puts a `Device` in the place of the GPU for a test."""
    from triton.runtime.driver import driver

    from gla_triton_runtime import replay

    monkeypatch.setattr(replay, "_prepared", {})
    fake = Device()
    monkeypatch.setattr(replay, "_graphed", [])
    monkeypatch.setattr(replay, "Graph", fake.graph)
    monkeypatch.setattr(replay, "_capturing", lambda: fake.capturing)
    monkeypatch.setattr(replay, "current_device", lambda: fake.index)
    monkeypatch.setattr(driver, "_active", fake)
    return fake


def compiled(gpu: Device, *types: str) -> SimpleNamespace:
    """Returns a kernel as Triton has compiled it for arguments of these types."""
    from triton.backends.nvidia import driver

    box = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 1, 8, 8], "fp4_padded": False}
    boxes = [box for x in types if x.startswith("tensordesc")]
    run = object.__new__(driver.CudaLauncher)
    names = ["global_scratch", "profile_scratch"]
    vars(run).update({f"{name}_{what}": 0 for name in names for what in ("size", "align")})
    vars(run).update(
        num_ctas=1,
        launch_cooperative_grid=False,
        launch_pdl=True,
        arg_annotations="a",
        kernel_signature="s",
        gsan_enabled=False,
    )
    run.launch = driver.wrap_handle_tensordesc(gpu.launch, dict(enumerate(types)), boxes)
    metadata = SimpleNamespace(tensordesc_meta=boxes)
    return SimpleNamespace(run=run, function="kernel", packed_metadata=(4, 1, 0), metadata=metadata)


class Kernel:
    """Stands for a function of triton.jit with these parameters, which Triton has compiled.

    Parameters whose names begin with "index" are not specialised on alignment.
    """

    def __init__(self, arg_names: list[str], kernel: SimpleNamespace) -> None:
        self.arg_names, self.kernel = arg_names, kernel
        self.params = [SimpleNamespace(do_not_specialize_on_alignment=name.startswith("index")) for name in arg_names]
        self.fn = type("fake", (), {})

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., SimpleNamespace]:
        """Launches as Triton does: a tensor is passed as its address."""
        kernel = self.kernel

        def launch(*arguments: Any) -> SimpleNamespace:
            values = [x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments]
            kernel.run(*grid, 7, kernel.function, kernel.packed_metadata, None, None, None, *values)
            return kernel

        return launch


def launch(grid: tuple[int, int, int], arguments: Mapping[str, Any], kernel: SimpleNamespace) -> Any:
    """Returns a `Launch` of a kernel with these arguments, as it is after compilation."""
    from gla_triton_runtime.launch import Launch

    return Launch(Kernel(list(arguments), kernel), grid, dict(arguments), compiled=kernel)


def tensor(T: int = 16) -> Tensor:
    """Returns a tensor at an aligned address."""
    x = torch.zeros(2, T, 3, 8)
    assert x.data_ptr() % 16 == 0
    return x


def record(gpu: Device, x: Tensor, y: Tensor) -> tuple[Any, list[Any]]:
    """Launches a call of one kernel, and records it.

    Returns:
        The recorded call, and the arguments of the launch that the device noted.
    """
    from gla_triton_runtime import replay
    from gla_triton_runtime.launch import start
    from gla_triton_runtime.tma import tiles

    arguments = {"x_desc": tiles(x, 8, 8), "absent": None, "y_ptr": y, "scale": 0.5, "T": 9}
    made = [launch(GRID, arguments, compiled(gpu, *TYPES))]
    start(made)
    return replay.record((x, None, y), made), gpu.launched.pop()


def two_launches(gpu: Device, x: Tensor, y: Tensor, scratch: Tensor, scale: float = 0.5) -> list[Any]:
    """Returns the launches of a call of two kernels. The first one passes a result to the second one in `scratch`."""
    kernels = [compiled(gpu, "*fp32", "*fp32") for _ in range(2)]
    first = launch((5, 1, 1), {"x_ptr": x, "scratch_ptr": scratch, "T": 1, "N": 2}, kernels[0])
    second = launch((6, 1, 1), {"scratch_ptr": scratch, "y_ptr": y, "scale": scale, "T": 3}, kernels[1])
    return [first, second]


def record_two(gpu: Device, x: Tensor, y: Tensor, scratch: Tensor) -> Any:
    """Records a call of two kernels."""
    from gla_triton_runtime.replay import record

    return record((x, y), two_launches(gpu, x, y, scratch))
