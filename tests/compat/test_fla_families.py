"""Functions of flash-linear-attention that are GLA: with one gate for each head or none, or composed of several calls.

Each is compared, in float64, with its recurrence, one token after the other.
"""

import functools
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from gla_core.compat import fla
from gla_core.compat.fla import composed
from gla_core.compat.fla import slots as slot_attention

B, H, K, V, M = 2, 3, 4, 5, 6
MODULES = (
    *("simple_gla", "retention", "lightning_attn", "linear_attn", "lightnet", "gsa", "rwkv6"),
    *("kda", "gated_delta_rule", "delta_rule"),
)


def randn(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


def gla(q, k, v, alpha, scale, S):
    """Returns outputs and final state; alpha [T, K or 1] are gates, S [K, V] is the initial state, for one sequence."""
    o = []
    for t in range(len(q)):
        S = alpha[t][:, None] * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return torch.stack(o) if o else v, S


def constant(gates):
    return lambda q, k, v, h, S: gla(q, k, v, torch.full((len(q), 1), gates[h]).double().exp(), K**-0.5, S)


def simple(q, k, v, g, h, S):
    return gla(q, k, v, g[:, None].exp(), K**-0.5, S)


def normalized(q, k, v, h, S, z):
    o, S = gla(q, k, v, torch.ones(len(q), 1), 1, S)
    sums = z + k.cumsum(0)
    return o / (q * sums).sum(-1, keepdim=True), S, (z + k.sum(0, keepdim=True))


def lightnet(q, k, v, h, S, z):
    sums = torch.cat([z.exp(), z.exp() + k.exp().cumsum(0)])  # [T + 1, K]
    o, S = gla(q, k.exp() / sums[1:], v, sums[:-1] / sums[1:], K**-0.5, S)
    return o, S, sums[-1:].log()


def slots(q, k, v, s, g, h, P, S):
    logits = []
    for t in range(len(q)):
        P = P * g[t].exp() + torch.outer(k[t], s[t])
        logits.append(K**-0.5 * q[t] @ P)
    p = torch.stack(logits).softmax(-1) if logits else s
    return *gla(p, s, v, g.exp(), 1, S)[:1], P, gla(p, s, v, g.exp(), 1, S)[1]


def rwkv6(q, k, v, w, u, h, S):
    o = []
    for t in range(len(q)):
        kv = torch.outer(k[t], v[t])
        o.append(K**-0.5 * q[t] @ (S + u[h][:, None] * kv))
        S = w[t].exp()[:, None] * S + kv
    return torch.stack(o) if o else v, S


def by_sequence(recurrence, tokens, states, offsets):
    """Runs a recurrence over sequences and heads; returns o like the values, and the final states like the initial."""
    rows = [(b, slice(None)) for b in range(len(tokens[0]))]
    if offsets is not None:
        rows = [(0, slice(i, j)) for i, j in itertools.pairwise(offsets)]
    o, finals = torch.zeros_like(tokens[2]), []
    axes = [1 if x.shape[1] == 1 else 0 for x in states]  # of the heads in the state of a sequence
    for n, (b, part) in enumerate(rows):
        results = [
            recurrence(
                *(x[b, part, h] for x in tokens), h, *(x[n].select(a, h) for x, a in zip(states, axes, strict=True))
            )
            for h in range(H)
        ]
        mask = torch.zeros(o.shape[:2], dtype=torch.bool)
        mask[b, part] = True
        o = o.masked_scatter(mask[..., None, None], torch.stack([f[0] for f in results], 1))
        finals.append([torch.stack([f[i + 1] for f in results], a) for i, a in enumerate(axes)])
    return o, *(torch.stack(x) for x in zip(*finals, strict=True))


GAMMA = torch.tensor([-0.1, -0.5, 0.0], dtype=torch.float64)
RETENTION = [torch.tensor(1 - 2.0 ** (-5 - h), dtype=torch.float64).log().item() for h in range(H)]
LIGHTNING = [-8 * h / H * (1 - 1 / 4) for h in range(H)]
STATE, SUM = (H, K, V), (1, H, K)
# name of the functions: recurrence, names of the tokens after q, k and v, shapes of the states, further arguments
CASES = {
    "simple_gla": (simple, ["g"], [STATE], {}),
    "simple_gla, constant": (constant(GAMMA.tolist()), [], [STATE], {"g_gamma": GAMMA}),
    "retention": (constant(RETENTION), [], [STATE], {}),
    "lightning_attn": (constant(LIGHTNING), [], [STATE], {"layer_idx": 1, "num_layers": 4}),
    "linear_attn": (constant([0.0] * H), [], [STATE], {"normalize": False}),
    "linear_attn, normalized": (normalized, [], [STATE, SUM], {"normalize": True}),
    "lightnet": (lightnet, [], [STATE, SUM], {}),
    "gsa": (slots, ["s", "g"], [(H, K, M), (H, M, V)], {}),
    "rwkv6": (rwkv6, ["w"], [STATE], {}),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    recurrence, names, shapes, options = CASES[request.param]
    sizes = {"q": (K,), "k": (K,), "v": (V,), "s": (M,), "g": (M,) if "s" in names else (), "w": (K,)}
    name = request.param.split(",")[0]

    def make(B, T, N):
        tokens = {x: randn(B, T, H, *sizes[x]) for x in ("q", "k", "v", *names)}
        tokens |= {x: -tokens[x].exp() for x in ("g", "w") if x in tokens}
        if "normalized" in request.param:
            tokens |= {x: tokens[x].exp() for x in ("q", "k")}
        states = [randn(N, *shape).exp() for shape in shapes]
        return tokens, states

    arguments = dict(options)
    if name == "rwkv6":
        u = randn(H, K)
        arguments["u"], recurrence = u, functools.partial(_with_u, u)
    return name, recurrence, make, arguments


def _with_u(u, q, k, v, w, h, S):
    return rwkv6(q, k, v, w, u, h, S)


def call(function, tokens, states, options, **more):
    tokens = {("r" if x == "q" and "r" in inspect.signature(function).parameters else x): y for x, y in tokens.items()}
    states = None if states is None else tuple(states) if len(states) > 1 else states[0]
    o, final = function(**tokens, **options, initial_state=states, output_final_state=True, **more)
    return o, *(final if isinstance(final, tuple) else (final,))


def functions(name):
    names = [f"{how}_{name}" for how in ("chunk", "fused_chunk", "fused_recurrent")]
    return [getattr(fla, each) for each in names if hasattr(fla, each)]


def close(actual, expected):
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 9, 10]], ids=["batch", "packed"])
def test_values_states_and_gradients(case, offsets):
    name, recurrence, make, options = case
    tokens, states = make(B if offsets is None else 1, 10, B if offsets is None else 4)
    leaves = [x.requires_grad_() for x in (*tokens.values(), *states)]
    leaves += [x.requires_grad_() for x in (options.get("u"),) if x is not None]
    expected = by_sequence(recurrence, list(tokens.values()), states, offsets)
    weights = [torch.randn_like(x) for x in expected]
    gradients = torch.autograd.grad(expected, leaves, weights)
    for function in functions(name):
        actual = call(function, tokens, states, options, cu_seqlens=None if offsets is None else torch.tensor(offsets))
        close(actual, expected)
        close(torch.autograd.grad(actual, leaves, weights), gradients)


@pytest.mark.parametrize("T", [0, 1, 70])
def test_without_an_initial_state_and_in_two_parts(case, T):
    name, _, make, options = case
    tokens, _ = make(B, T + 1, B)
    for function in functions(name):
        whole = call(function, tokens, None, options)
        first = call(function, {x: y[:, :T] for x, y in tokens.items()}, None, options)
        second = call(function, {x: y[:, T:] for x, y in tokens.items()}, first[1:], options)
        close((torch.cat([first[0], second[0]], 1), *second[1:]), whole)


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 9, 10]], ids=["batch", "packed"])
def test_from_the_last_token_to_the_first(case, offsets):
    name, _, make, options = case
    function = getattr(fla, f"fused_recurrent_{name}")
    if "reverse" not in inspect.signature(function).parameters:
        pytest.skip("it has no such argument")
    tokens, states = make(B if offsets is None else 1, 10, B if offsets is None else 4)
    packed = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    actual = call(function, tokens, states, options, reverse=True, **packed)
    for n, (i, j) in enumerate([(0, 10)] * B if offsets is None else itertools.pairwise(offsets)):
        b = n if offsets is None else 0
        part = {x: y[b : b + 1, i:j].flip(1) for x, y in tokens.items()}
        if i < j:
            expected = call(function, part, [x[n : n + 1] for x in states], options)
            close((actual[0][b : b + 1, i:j].flip(1), *(x[n : n + 1] for x in actual[1:])), expected)


WIDTHS = {"q": K, "r": K, "k": K, "v": V, "s": M, "gk": K, "w": K}
"""The width of each tensor [B, T, H, width] that a drop-in takes."""
DROP_INS = [name for name in fla.__all__ if {"q", "r"} & {*inspect.signature(getattr(fla, name)).parameters}]
# rows, tokens of a row, offsets
EMPTY = {
    "no token": (B, 0, None),
    "no row": (0, 10, None),
    "packed, no token": (1, 0, [0, 0, 0]),
    "packed, no sequence": (1, 10, [3]),
    "packed, neither": (1, 0, [0]),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("name", DROP_INS)
def test_every_drop_in_without_tokens(name, kind):
    """The output is 0 or empty, the final state is the initial one, and gradients of tokens are 0."""
    rows, T, offsets = EMPTY[kind]
    function = getattr(fla, name)
    known = inspect.signature(function).parameters
    x = {each: randn(rows, T, H, width).requires_grad_() for each, width in WIDTHS.items() if each in known}
    others = {"u": randn(H, K), "layer_idx": 1, "num_layers": 4, "output_final_state": True}
    others |= {"beta": randn(rows, T, H)}
    x |= {each: value for each, value in others.items() if each in known}
    if offsets is not None:
        if "cu_seqlens" not in known:
            return
        x["cu_seqlens"] = torch.tensor(offsets)
    per_head = name.endswith(("simple_gla", "gated_delta_rule", "gdn"))
    gate = (H,) if per_head else (H, M) if name.endswith("gsa") else (H, K)
    gates = [{"g": None}, {"g": -randn(rows, T, *gate).exp()}] if "g" in known else [{}]
    if {"g", "gk"} <= set(known):
        gates[1]["gk"] = None
    for more, reverse in itertools.product(gates, [False, True] if "reverse" in known else [None]):
        options = {**x, **more, **({} if reverse is None else {"reverse": reverse})}
        o, state = function(**options)
        assert (o.shape, o.any()) == (x["v"].shape, False)
        if state is not None:
            state = tree_map(torch.randn_like, state)
            again, final = function(**options, initial_state=state)
            torch.testing.assert_close((again, final), (o, state), rtol=0, atol=0)
        (dv,) = torch.autograd.grad(o.sum(), x["v"], allow_unused=True, materialize_grads=True)
        assert not dv.any()


def test_values_first(case):
    name, _, make, options = case
    tokens, states = make(B, 10, B)
    for function in functions(name):
        if "state_v_first" in inspect.signature(function).parameters:
            o, state, *rest = call(function, tokens, states, options)
            passed = [states[0].mT.contiguous(), *states[1:]]
            close(call(function, tokens, passed, options, state_v_first=True), (o, state.mT, *rest))


def test_without_attentions():
    q, k, v, g = randn(B, 10, H, K), randn(B, 10, H, K), randn(B, 10, H, V), -randn(B, 10, H).exp()
    close([fla.parallel_simple_gla(q, k, v, g)[0]], [fla.chunk_simple_gla(q, k, v, g)[0]])
    close([fla.parallel_retention(q, k, v, 0.3)[0]], [fla.chunk_retention(q, k, v, 0.3)[0]])
    assert fla.parallel_retention(q, k, v)[1] is None
    for function in (fla.parallel_simple_gla, fla.parallel_retention):
        with pytest.raises(NotImplementedError, match="output_attentions: not computed here; call"):
            function(q, k, v, output_attentions=True)


def test_slots_of_grouped_query_heads_and_logits():
    q, k, v, s = randn(B, 10, 2 * H, K), randn(B, 10, H, K), randn(B, 10, H, V), randn(B, 10, H, M)
    states = (randn(B, H, K, M), randn(B, H, M, V))
    sums = s.logcumsumexp(1)
    g, writes = torch.cat([sums[:, :1], sums[:, :-1]], 1) - sums, (s - sums).exp()
    o, final = fla.chunk_gsa(q, k, v, s, None, 0.3, states, True)
    for i in range(2):
        expected, pair = fla.chunk_gsa(q[:, :, i::2], k, v, writes, g, 0.3, states, True)
        close((o[:, :, i::2], *final), (expected, *pair))


def test_parts_of_states():
    q, k, v, z = (randn(B, T, H, d).exp() for T, d in ((10, K), (10, K), (10, V), (1, K)))
    o, _ = fla.chunk_linear_attn(q, k, v)
    close([fla.chunk_linear_attn(q, k, v, initial_state=torch.zeros(B, H, K, V))[0]], [o])
    assert fla.chunk_linear_attn(q, k, v)[1][0] is None
    with_sum, (state, last) = fla.chunk_linear_attn(q, k, v, initial_state=(None, z), output_final_state=True)
    close(
        [with_sum, last],
        [o * (q * k.cumsum(1)).sum(-1, True) / (q * (z + k.cumsum(1))).sum(-1, True), z + k.sum(1, True)],
    )
    assert state.shape == (B, H, K, V)
    with pytest.raises(TypeError, match=r"initial_state is a pair; expected \[N, H, K, V\], or normalize=True"):
        fla.chunk_linear_attn(q, k, v, initial_state=(None, z), normalize=False)


def test_half_precision():
    q, k, v = (torch.randn(B, 10, H, d, dtype=torch.bfloat16) for d in (K, K, V))
    o, (state, z) = fla.chunk_linear_attn(q.exp(), k.exp(), v, output_final_state=True)
    assert (o.dtype, state.dtype, z.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    o, (state, z) = fla.chunk_lightnet(q, k, v, output_final_state=True)
    assert (o.dtype, state.dtype, z.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    o, pair = fla.chunk_gsa(q, k, v, k, initial_state=(torch.zeros(B, H, K, K), None), output_final_state=True)
    assert (o.dtype, *(x.dtype for x in pair)) == (torch.bfloat16, torch.float32, torch.float32)
    o, state = fla.chunk_rwkv6(q, k, v, -k.exp(), torch.ones(H, K, dtype=torch.bfloat16), output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("keys", [1, 2, 3, 64])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("has_state", [True, False])
def test_one_token_of_slots_adds_parts_of_keys(monkeypatch, has_state, groups, keys):
    """K is 4: sums over keys have 4, 2 or 1 parts. With gradients the token is computed as a sequence."""
    monkeypatch.setattr(slot_attention, "KEYS", keys)
    q, k, v, s = randn(B, 1, groups * H, K), randn(B, 1, H, K), randn(B, 1, H, V), randn(B, 1, H, M)
    states = (randn(B, H, K, M), randn(B, H, M, V)) if has_state else None
    options = {"initial_state": states, "output_final_state": True}
    o, pair = fla.fused_recurrent_gsa(q, k, v, s, -s.exp(), **options)
    wanted, wanted_pair = fla.fused_recurrent_gsa(q.requires_grad_(), k, v, s, -s.exp(), **options)
    close([o, *pair], [wanted, *wanted_pair])


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_one_token_of_rwkv6_without_gradients_is_a_step(monkeypatch, reverse, has_state):
    """With gradients, of the bonus or the state alone too, it is computed as a sequence, which has them."""
    seen, step = [], composed._recurrent_gla_step
    monkeypatch.setattr(composed, "_recurrent_gla_step", lambda *args, **kw: seen.append(1) or step(*args, **kw))
    tokens = [randn(B, 1, H, K), randn(B, 1, H, K), randn(B, 1, H, V), -randn(B, 1, H, K).exp()]
    u, states = randn(H, K), [randn(B, H, K, V) if has_state else torch.zeros(B, H, K, V).double()]
    leaves = [*tokens, u, *states[: int(has_state)]]
    wanted = by_sequence(functools.partial(_with_u, u), tokens, states, None)

    def call(*x):
        options = {"initial_state": x[5] if has_state else None, "output_final_state": True, "reverse": reverse}
        return fla.fused_recurrent_rwkv6(*x[:5], **options)

    close(call(*leaves), wanted)
    assert seen == [1]
    for leaf in leaves:
        leaf.requires_grad_()
        close(call(*leaves), wanted)
        with torch.no_grad():
            assert call(*leaves)[1] is not None
        leaf.requires_grad_(False)
    assert seen == [1] * (1 + len(leaves))
    leaves = [x.requires_grad_() for x in leaves]
    actual = torch.autograd.grad([x.square().sum() for x in call(*leaves)], leaves)
    o, state = by_sequence(functools.partial(_with_u, u), tokens, states, None)
    close(actual, torch.autograd.grad(o.square().sum() + state.square().sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_one_token_of_rwkv6_takes_a_bonus_of_any_dtype(dtype):
    q, k, v = (torch.randn(B, 1, H, d, dtype=torch.bfloat16) for d in (K, K, V))
    w, u = -torch.rand(B, 1, H, K), torch.randn(H, K).to(dtype)
    o, state = fla.fused_recurrent_rwkv6(q, k, v, w, u)
    assert state is None
    wanted, _ = fla.fused_recurrent_rwkv6(*(x.double() for x in (q, k, v, w, u)))
    torch.testing.assert_close(o.double(), wanted, rtol=0.02, atol=0.02)


PACKED = {
    "rwkv6": lambda q, k, v, w, s, u, offsets: fla.chunk_rwkv6(q, k, v, w, u, cu_seqlens=offsets),
    "lightnet": lambda q, k, v, w, s, u, offsets: fla.chunk_lightnet(q, k, v, cu_seqlens=offsets),
    "linear_attn": lambda q, k, v, w, s, u, offsets: fla.chunk_linear_attn(q, k, v, cu_seqlens=offsets),
    "gsa": lambda q, k, v, w, s, u, offsets: fla.chunk_gsa(q, k, v, s, cu_seqlens=offsets),
}


@pytest.mark.parametrize("family", PACKED)
def test_rows_of_no_sequence(family):
    """Whatever they hold, their o and gradients are 0, and they change nothing else."""
    tokens = [randn(1, 6, H, K), randn(1, 6, H, K), randn(1, 6, H, V), -randn(1, 6, H, K).exp(), randn(1, 6, H, M)]
    u = randn(H, K)

    def results(*x, first):
        leaves = [y.requires_grad_() for y in (*x, u)]
        o, _ = PACKED[family](*leaves, torch.tensor([0, 3, 6]) + first)
        return o, *torch.autograd.grad(o.square().sum(), leaves, allow_unused=True, materialize_grads=True)

    *actual, du = results(*(F.pad(x, (0, 0, 0, 0, 2, 2), value=torch.nan) for x in tokens), first=2)
    *expected, du_expected = results(*tokens, first=0)
    close([*actual, du], [*(F.pad(x, (0, 0, 0, 0, 2, 2)) for x in expected), du_expected])


def test_arguments_that_are_refused():
    q, k, v, g = randn(B, 3, H, K), randn(B, 3, H, K), randn(B, 3, H, V), -randn(B, 3, H).exp()
    with pytest.raises(ValueError, match="g and g_gamma are both given"):
        fla.chunk_simple_gla(q, k, v, g, GAMMA)
    with pytest.raises(TypeError, match="chunk_retention takes no argument 'head_first'"):
        fla.chunk_retention(q, k, v, chunk_size=32, head_first=True)
    with pytest.warns(DeprecationWarning, match="pass state_v_first"):
        _, state = fla.fused_recurrent_retention(q, k, v, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (B, H, V, K)


@pytest.mark.parametrize("module", MODULES)
def test_signatures_are_those_of_flash_linear_attention(module):
    home = pytest.importorskip(f"fla.ops.{module}", reason="needs flash-linear-attention 0.6.0: make test-fla")
    for name in home.__all__:
        if name.startswith("naive") or name == "fused_chunk_delta_rule":  # which raises NotImplementedError
            continue
        theirs, ours = (inspect.signature(getattr(where, name)).parameters for where in (home, fla))
        described = [[(x.name, x.default, x.kind) for x in each.values()] for each in (theirs, ours)]
        assert described[0] == described[1]


def test_values_are_those_of_its_naive_functions():
    naive = pytest.importorskip("fla.ops.simple_gla.naive", reason="needs flash-linear-attention 0.6.0: make test-fla")
    from fla.ops.gsa.naive import naive_recurrent_gsa
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.retention.naive import naive_retention
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    torch.manual_seed(0)
    q, k, v, w, s = (torch.randn(B, 70, H, d) for d in (K, K, V, K, M))
    u, state, pair = torch.randn(H, K), torch.randn(B, H, K, V), (torch.randn(B, H, K, M), torch.randn(B, H, M, V))
    g, g_slots, w = -w[..., 0].exp(), -s.exp(), -w.exp()
    with_sum, grouped = (state.exp(), torch.rand(B, 1, H, K)), torch.randn(B, 70, 2 * H, K)

    def first(function, *args, **kwargs):
        """Calls a function of tensors [B, H, T, D]."""
        actual = function(*(x.transpose(1, 2) for x in args), **kwargs)
        return actual.transpose(1, 2) if isinstance(actual, torch.Tensor) else (actual[0].transpose(1, 2), actual[1])

    options = {"initial_state": state, "output_final_state": True}
    close(fla.chunk_simple_gla(q, k, v, g, **options), naive.naive_recurrent_simple_gla(q, k, v, g, **options))
    close([fla.parallel_retention(q, k, v)[0]], [first(naive_retention, q, k, v)])
    close(fla.chunk_rwkv6(q, k, v, w, u, **options), first(naive_recurrent_rwkv6, q, k, v, w, u=u, **options))
    for options in ({"initial_state": state, "normalize": False}, {"initial_state": with_sum, "normalize": True}):
        arguments = (q.exp(), k.exp(), v, 0.3)
        o, final = fla.chunk_linear_attn(*arguments, output_final_state=True, **options)
        expected, theirs = naive_recurrent_linear_attn(*arguments, output_final_state=True, **options)
        torch.testing.assert_close((o, final), (expected, theirs), rtol=1e-4, atol=1e-4)
    options = {"initial_state": pair, "output_final_state": True}
    for queries, slots, gates in ((q, s, g_slots), (grouped, s, g_slots), (grouped, s, None)):
        o, final = fla.chunk_gsa(queries, k, v, slots, gates, **options)
        expected, theirs = naive_recurrent_gsa(queries, k, v, slots, gates, **options)
        torch.testing.assert_close((o, final), (expected, theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [composed.PART + 1, 3 * composed.PART])
def test_sums_of_exponentials_by_parts(T):
    x = (20 * randn(2, T, 3, 4)).requires_grad_()
    do = randn(2, T, 3, 4)
    sums, expected = composed._Rows().log_cumsum_exp(x), torch.logcumsumexp(x, 1)
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, do)[0] for y in (sums, expected)))
