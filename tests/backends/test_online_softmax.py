"""The kernels of online_softmax on their own: the edges of tiles and of splits, special values, every layout."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, relative_error
from gla_core.workloads.inputs import normal
from tests.backends.prepared_calls import call_prepared, described, preparing
from tests.kernels import INTERPRETED

pytest.importorskip("triton")

from gla_triton_kernels.online_softmax.plan import MOST_ON_CHIP as MOST
from gla_triton_kernels.online_softmax.plan import MOST_UNALIGNED_ON_CHIP as ODD

COLUMNS = [1, 2, 31, 1023, 1024, 1025, 4096, 4097, ODD, ODD + 1, MOST, MOST + 1, MOST + 16, 2 * MOST, 70001, 81921]

pytestmark = pytest.mark.kernels


@pytest.fixture
def prepare(backend):
    return preparing(backend, "online_softmax")


@pytest.fixture
def online_softmax(prepare):
    return functools.partial(call_prepared, "online_softmax", prepare)


@pytest.fixture(params=[torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16]), ids=str)
def dtype(request):
    """Returns a dtype, but not bfloat16 if kernels are interpreted: the interpreter truncates where it should round."""
    return request.param


def random(*shape, device, dtype=torch.float32, seed=0):
    return normal(shape, dtype, torch.Generator(device).manual_seed(seed))


def check(online_softmax, x, dim):
    y = online_softmax(x, dim)
    assert y.is_contiguous()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert relative_error(y, oracle.softmax(x, dim)) <= FORWARD[x.dtype]
    return y


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 3])
def test_columns_at_the_edges_of_tiles_and_splits(online_softmax, device, dtype, columns, rows):
    check(online_softmax, random(rows, columns, device=device, dtype=dtype), 1)


@pytest.mark.parametrize("columns", [ODD + 1, 4 * 4096 + 7] + ([] if INTERPRETED else [4 * 4096 - 7, 2 * MOST + 1]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_begin_anywhere(online_softmax, device, columns, dtype):
    """Rows begin and end at any distance from the aligned tiles. In the last case there are gaps between rows."""
    x = random(4, columns, device=device, dtype=dtype)
    check(online_softmax, x, 1)
    check(online_softmax, x.view(2, 2, columns), 2)
    check(online_softmax, x[:, 1:-2], 1)


@pytest.mark.parametrize("columns", [255, 257, 1100] + ([] if INTERPRETED else [5000]))
@pytest.mark.parametrize("inner", [1, 7, 65] if INTERPRETED else [1, 7, 33, 64, 65])
def test_columns_that_are_not_neighbours_in_memory(online_softmax, device, columns, inner):
    check(online_softmax, random(2, columns, inner, device=device), 1)


@pytest.mark.parametrize("columns", [300, MOST + 300, MOST + 304])  # unaligned rows take one column at a time
@pytest.mark.parametrize("special", [float("-inf"), float("inf"), float("nan"), 3.4e38, -3.4e38])
def test_special_values_as_in_torch(online_softmax, device, columns, special):
    x = random(4, columns, device=device)
    x[0, 7], x[1, 5:], x[2, :], x[3, columns // 2] = special, special, special, special
    torch.testing.assert_close(online_softmax(x, 1), torch.softmax(x, 1), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [300, MOST + 300, MOST + 304, 70000])
def test_the_same_bits_every_run(prepare, columns):
    x = random(3, columns, device="cuda")
    online_softmax = prepare(described("online_softmax", x, 1))
    first = online_softmax(x, 1)
    assert all(torch.equal(first, online_softmax(x, 1)) for _ in range(3))


def test_tiles_that_are_all_minus_infinity(online_softmax, device):
    """Such tiles add nothing to a row that has finite entries elsewhere."""
    x = torch.full((3, 100_000), -torch.inf, device=device)
    x[0, 99_999], x[1, 0], x[1, 50_000] = 2.0, -3.0, -3.0
    y = online_softmax(x, 1)
    expected = torch.zeros_like(x)
    expected[0, 99_999], expected[1, 0], expected[1, 50_000], expected[2] = 1.0, 0.5, 0.5, torch.nan
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_a_row_that_rises(online_softmax, device):
    """Each tile has a greater maximum than the tiles before it, and the exponentials of the first tiles vanish."""
    check(online_softmax, torch.linspace(-300, 300, 100_000, device=device)[None], 1)


@pytest.mark.parametrize("dim", range(5))
def test_dimensions_that_cannot_be_merged(online_softmax, device, dim):
    x = random(3, 4, 3, 5, 6, device=device)
    check(online_softmax, x.permute(2, 0, 3, 1, 4), dim)
    check(online_softmax, x[:, ::2, 1:, ::2, 1:], dim)
    check(online_softmax, x[:, :1].expand(3, 4, 3, 5, 6), dim)


def test_four_row_dimensions_that_cannot_be_merged(online_softmax, device):
    check(online_softmax, random(4, 4, 4, 4, 6, device=device)[::2, ::2, ::2, ::2].permute(3, 2, 1, 0, 4), 4)


@settings(max_examples=8 if INTERPRETED else 30)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dim=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_any_shape_order_and_dimension(online_softmax, device, shape, order, dim, seed):
    x = random(*shape, device=device, seed=seed)
    x[random(*shape, device=device, seed=seed + 1) > 1] = -torch.inf
    axes = list(range(x.ndim))
    order.shuffle(axes)
    check(online_softmax, x.permute(axes), dim % x.ndim)


@settings(max_examples=5 if INTERPRETED else 20)
@given(rows=st.integers(1, 4), columns=st.integers(1, 60_000), start=st.integers(0, 9), seed=st.integers(0, 2**20))
def test_long_rows_at_any_address(online_softmax, device, rows, columns, start, seed):
    x = random(rows, start + columns, device=device, dtype=torch.float16, seed=seed)
    check(online_softmax, x[:, start:], 1)


def test_the_second_call_gives_what_the_first_gave(prepare, device):
    """The second call replays the launches of the first. A tensor that had to be copied is copied again."""
    four = random(4, 4, 4, 4, 6, device=device)[::2, ::2, ::2, ::2].permute(3, 2, 1, 0, 4)
    for x, dim in ((random(3, 20_000 if INTERPRETED else 70_000, device=device), 1), (four, 4)):
        online_softmax = prepare(described("online_softmax", x, dim))
        first = online_softmax(x, dim)
        assert torch.equal(first, online_softmax(x, dim))
        x.neg_()
        check(online_softmax, x, dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2**22), (1, 2**24 + 1), (131, 70001), (1000, 16385)])
def test_rows_over_the_whole_device(prepare, dtype, shape):
    x = random(*shape, device="cuda", dtype=dtype)
    online_softmax = prepare(described("online_softmax", x, 1))
    y = check(online_softmax, x, 1)
    assert torch.equal(y, online_softmax(x, 1))


@pytest.mark.gpu
def test_more_elements_than_32_bits_address(online_softmax):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    for shape, dim in (((2**21 + 2, 1024), 1), ((1024, 2**21 + 2), 0), ((2, 2**30 + 5), 1), ((2**30 + 5, 2), 0)):
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        last = x.select(1 - dim, -1)
        last.copy_(random(*last.shape, device="cuda", dtype=torch.bfloat16))
        y = online_softmax(x, dim).select(1 - dim, -1)
        assert relative_error(y, oracle.softmax(last)) <= FORWARD[torch.bfloat16]
        del x, y, last
