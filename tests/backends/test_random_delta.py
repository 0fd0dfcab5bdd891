"""Random calls of delta rules against the float64 oracle, with the gradients of all inputs; see test_random_cases.py.

Keys are unlike, alike or equal, of length 1 or not. Betas are between 0 and 1 or 0 and 2, and some are 0. A part of the
calls takes projections: q and k of any length, logits of betas, or logits of gates with their parameters.
"""

import pytest
import torch
import torch.nn.functional as F

import gla_core as gla
from gla_core.conformance import oracle
from gla_core.conformance.tolerances import FORWARD, GRADIENT, relative_error
from gla_core.dispatch.tensors import wide
from gla_core.workloads.inputs import delta_inputs, normal, token_of
from tests.backends.test_random_cases import (
    ENOUGH,
    WIDTHS,
    WITH_GRADIENTS,
    batches,
    drawn_layout,
    error_of_sum,
    gate_form,  # noqa: F401 - a fixture
    has_few_bits,
    head_counts,
    seeds,
    sequences,
    sources,
)
from tests.kernels import DTYPES, INTERPRETED

FEW = 2 if INTERPRETED else 8
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-3
TOKENS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")

on_backends = pytest.mark.parametrize("backend", WITH_GRADIENTS)


@batches
@on_backends
@pytest.mark.usefixtures("short_segments")
def test_random_sequences(device, batch, backend, random_cases):
    missed = [case for seed in seeds(device, batch, random_cases or FEW) for case in misses(seed, device, backend)]
    assert not missed


@batches
@on_backends
def test_random_steps(device, batch, backend, random_cases):
    missed = [
        case for seed in seeds(device, batch, random_cases or FEW) for case in missed_steps(seed, device, backend)
    ]
    assert not missed


def misses(seed, device, backend):
    """Yields a description of each wrong result and gradient of the call drawn from `seed`, with its error."""
    kind, draw = sources(seed, device)
    dtype = kind.choice(dtypes(backend))
    inputs, sizes = sequences(kind, draw, dtype, device, seed, delta)
    x, factor, how = projections(kind, draw, arguments(inputs), sizes["gates"], device, seed)
    every, recomputed, v_first = kind.choice([None, None, 64]), kind.random() < 0.2, kind.random() < 0.2
    generator = torch.Generator(device).manual_seed(seed + 4)
    loss = {"o": drawn_layout(draw, normal(x["v"].shape, dtype, generator))}
    if draw.random() < 0.7:
        N = len(x["q"]) if x["cu_seqlens"] is None else len(x["cu_seqlens"]) - 1
        state = (N, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3])
        loss["state"] = normal(state, wide(dtype), generator)
    expected, terms = truth(x, loss, every)
    options = {"checkpoint_every": every, "recompute_states": recomputed, "state_v_first": v_first}
    actual = results(x, loss, options, backend)
    where = f"seed {seed}: {dtype} {sizes} {how} {every} {recomputed} {v_first} {list(loss)} {loss['o'].stride()}"
    longest = max(sizes.get("lengths", [x["q"].shape[1]]))

    def error_of(name, y):
        return error_of_sum(y, terms[name], longest) if name in terms else relative_error(y, expected[name])

    for name, ref in expected.items():
        y = actual[name].detach().cpu()
        error, budgets = error_of(name, y), GRADIENT if name.startswith("d") else FORWARD
        budget = factor * max(budgets[dtype], budgets[y.dtype])
        if (
            error > budget
            and not has_few_bits(y, ref)
            and error > budget * amplification(x, loss, every, name, error_of)
        ):
            yield f"{where}: {name}: error {error:.1e}"


def amplification(x, loss, every, name, error_of):
    """Returns by how much more a result changes than the inputs if these are rounded, and 1 if it changes less.

    Where keys are equal, results may be differences of large numbers, and no product of rounded numbers is then exact.
    """
    rounding = torch.finfo(x["q"].dtype).eps / 2
    draw = torch.Generator().manual_seed(0)

    def rounded(y):
        noise = 2 * torch.rand(y.shape, generator=draw, dtype=torch.float64) - 1
        return y.detach().cpu().double() * (1 + rounding * noise)

    changes = []
    for _ in range(3):
        inputs, seed = {**x, **{n: rounded(x[n]) for n in "qkv"}}, {**loss, "o": rounded(loss["o"])}
        changes.append(error_of(name, truth(inputs, seed, every)[0][name]))
    return max(1.0, *(change / rounding for change in changes))


def missed_steps(seed, device, backend):
    """Yields a description of each wrong result of a step, on states or on a pool, with its error."""
    kind, draw = sources(seed, device)
    dtype, (K, V) = kind.choice(dtypes(backend)), kind.choice(WIDTHS)
    B, heads = draw.randint(ENOUGH, 24), head_counts(kind, draw)
    if heads["gates"] == "extreme" and dtype == torch.float16:  # outputs may lie below float16's range
        heads["gates"] = "mild"
    inputs = delta(T=1, B=B, K=K, V=V, dtype=dtype, device=device, initial_state=True, seed=seed, **heads)
    x, factor, how = projections(kind, draw, arguments(inputs), heads["gates"], device, seed)
    state, slots = x.pop("initial_state"), None
    if dtype != torch.float64:
        state = state.to(kind.choice(STATE_DTYPES))
    plain = {name: token_of(y, 0) for name, y in computed(in_float64(x)).items() if name in TOKENS}
    if kind.random() < 0.5:
        state = state.repeat(3, 1, 1, 1)
        slots = torch.tensor(draw.sample([-1, *range(3 * B)], B), device=device)
    o, new = oracle.recurrent_delta_step(**plain, state=state.cpu(), slots=None if slots is None else slots.cpu())
    token = {name: token_of(y, 0) if name in TOKENS else y for name, y in x.items() if name != "cu_seqlens"}
    actual = gla.recurrent_delta_step(**token, state=state, slots=slots, backend=backend)
    budgets = (factor * FORWARD[dtype], max(factor * FORWARD[dtype], FORWARD[state.dtype]))
    for name, y, ref, budget in zip(("o", "state"), actual, (o, new), budgets, strict=True):
        error = relative_error(y.cpu(), ref)
        if error > budget:
            yield f"seed {seed}: step {dtype} {state.dtype} {B} {K} {V} {heads} {how}: {name}: error {error:.1e}"


def dtypes(backend):
    return DTYPES if backend != "reference" else [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def delta(**sizes):
    """Returns inputs of delta rules, whose queries have as many heads as keys."""
    return delta_inputs(**{**sizes, "R": sizes["R"] * sizes["G"], "G": 1})


def arguments(x):
    """Returns the arguments of `chunk_delta` by name."""
    return {name: getattr(x, name) for name in (*TOKENS, "initial_state", "cu_seqlens")}


def projections(kind, draw, x, gates, device, seed):
    """Returns random arguments of a public function in the place of unit vectors, log gates and betas.

    Args:
        x: the arguments of `chunk_delta` by name, with log gates of the strength `gates`.

    Returns:
        The arguments; by how much a result may be further from the oracle's because PyTorch rounds what it computes of
        projections; and what was drawn.
    """
    generator = torch.Generator(device).manual_seed(seed + 3)
    if x["q"].dtype == torch.float64:  # PyTorch computes what is made of logits of float32 in float32
        x = {name: y.double() if name in ("g", "beta") and y is not None else y for name, y in x.items()}
    normalized, are_logits, limit = kind.random() < 0.4, kind.random() < 0.4, kind.choice([1, 1, 2])
    gate = None if x["g"] is None else kind.choice([None, None, "logsigmoid", "softplus", "bounded"])
    alike, length = draw.choice([0.0, 0.0, 0.7, 1.0]), draw.choice([1.0, 1.0, 4.0, 2.0**-6])
    k = F.normalize(alike * x["k"][:, :1].to(wide(x["k"].dtype)) + (1 - alike) * x["k"], dim=-1)
    x = {**x, "k": ((3 if normalized else length) * k).to(x["k"].dtype)}
    if normalized:
        x |= {"q": 3 * x["q"], "normalize": EPS}
    if are_logits:
        x |= {"beta": 2 * normal(x["beta"].shape, x["beta"].dtype, generator), "beta_limit": limit}
    elif normalized or length <= 1:
        x["beta"] = limit * x["beta"]
    else:  # a state is bounded if beta |k|^2 is at most 2
        x["beta"] = limit / length**2 * x["beta"]
    if are_logits and not normalized and length > 1:
        x["k"] = x["k"] / length
    if not are_logits and draw.random() < 0.5:
        is_zero = torch.rand(x["beta"].shape, generator=generator, device=device) < 0.3
        x["beta"] = x["beta"].where(~is_zero, 0)
    if gate is not None:
        x |= logits(kind, gate, x, gates, generator)
    is_projected = normalized or are_logits or gate is not None
    how = f"alike {alike}, length {length}, normalized {normalized}, limit {limit} of {are_logits}, gate {gate}"
    return x, 2 if is_projected else 1, how


def logits(kind, gate, x, gates, generator):
    """Returns g, as logits of any value, and gate."""
    g, Hv = x["g"], x["beta"].shape[-1]
    made = normal(g.shape, g.dtype, generator)
    if gates == "-inf" and gate != "bounded":
        end = torch.inf if gate == "softplus" else -torch.inf
        made = torch.where(torch.rand(g.shape, generator=generator, device=g.device) < 0.02, end, made)
    if gate == "logsigmoid":
        return {"g": made, "gate": gate}
    dtype = wide(x["q"].dtype)
    widths = [(Hv,), (Hv, g.shape[-1])] if g.ndim == 4 else [(Hv,)]
    A_log = normal((Hv,), dtype, generator) if kind.random() < 0.8 else None
    if A_log is not None and gate == "bounded":
        A_log = -A_log.abs()  # the slope of a gate near its bound has few bits
    dt_bias = normal(kind.choice(widths), dtype, generator) if kind.random() < 0.8 else None
    return {"g": made, "gate": (gate, A_log, dt_bias, *([-5.0] if gate == "bounded" else []))}


def results(x, loss, options, backend):
    """Returns the results of `chunk_delta` by name, and the gradients of its inputs; states are [.., K, V]."""
    differentiable = [*TOKENS, "initial_state"]
    leaves = {name: x[name].detach().requires_grad_() for name in differentiable if x[name] is not None}
    call, v_first = {**x, **leaves}, options["state_v_first"]
    if isinstance(x.get("gate"), tuple):
        form, *parameters = x["gate"]
        named = zip(PARAMETERS, parameters[:2], strict=True)
        shared = {name: y.detach().requires_grad_() for name, y in named if y is not None}
        call["gate"], leaves = (form, *(shared.get(name) for name in PARAMETERS), *parameters[2:]), leaves | shared
    if v_first and x["initial_state"] is not None:
        call["initial_state"] = leaves["initial_state"].mT
    call["output_final_state"] = "state" in loss
    o, state, *checkpoints = gla.chunk_delta(**call, **options, backend=backend)
    out = {"o": o, "state": state, "checkpoints": checkpoints[0] if checkpoints else None}
    out = {name: y.mT if v_first and name != "o" else y for name, y in out.items() if y is not None}
    ds = torch.autograd.grad([out[name] for name in loss], list(leaves.values()), list(loss.values()))
    return {**out, **{f"d{name}": d for name, d in zip(leaves, ds, strict=True)}}


def truth(x, loss, every):
    """Returns results and gradients in float64.

    Returns:
        The results and gradients by name, and, of gradients that are sums over tokens, the gradients of each token.
    """
    y = in_float64(x)
    shape = y["beta"].shape if y["g"] is None or y["g"].ndim < 3 else y["g"].shape
    per_token = {name: z for name in (*PARAMETERS, "g") if (z := y.get(name)) is not None and z.ndim < 3}
    for name, z in per_token.items():
        y[name] = (z[:, None] if z.ndim == 1 and len(shape) == 4 else z).expand(shape).clone()
    names = [name for name in (*TOKENS, "initial_state", *PARAMETERS) if y.get(name) is not None]
    leaves = {name: y[name].requires_grad_() for name in names}
    plain = computed({**y, **leaves})
    plain = {name: plain[name] for name in (*TOKENS, "initial_state", "cu_seqlens")}
    o, state, *checkpoints = oracle.chunk_delta_with_checkpoints(**plain, checkpoint_every=every)
    out = {name: {"o": o, "state": state}[name] for name in loss}
    nothing = 0 * sum(leaf.sum() for leaf in leaves.values() if leaf.isfinite().all())
    seeds = [loss[name].cpu().double() for name in out]
    ds = torch.autograd.grad([z + nothing for z in out.values()], list(leaves.values()), seeds, allow_unused=True)
    gradients = {f"d{name}": leaf * 0 if d is None else d for (name, leaf), d in zip(leaves.items(), ds, strict=True)}
    terms = {}
    for name, z in per_token.items():
        d = gradients[f"d{name}"]
        terms[f"d{name}"] = d.sum(-1) if d.ndim - 2 > z.ndim else d
        gradients[f"d{name}"] = terms[f"d{name}"].sum((0, 1))
    expected = {**out, **({"checkpoints": checkpoints[0]} if checkpoints else {}), **gradients}
    return {name: z.detach() for name, z in expected.items()}, terms


def in_float64(x):
    """Returns arguments on the CPU in float64, those of the gate by name."""
    gate = x.get("gate")
    parameters = dict(zip((*PARAMETERS, "bound"), gate[1:], strict=False)) if isinstance(gate, tuple) else {}
    x = {**x, **parameters, "gate": gate[0] if isinstance(gate, tuple) else gate}
    tensors = {name: y.detach().cpu() for name, y in x.items() if isinstance(y, torch.Tensor)}
    return {**x, **{name: y.double() if y.is_floating_point() else y for name, y in tensors.items()}}


def computed(x):
    """Returns arguments that `in_float64` made with unit vectors, log gates and betas in the place of projections."""
    x = dict(x)
    if "normalize" in x:
        x |= {name: x[name] / (x[name].square().sum(-1, keepdim=True) + EPS).sqrt() for name in ("q", "k")}
    if "beta_limit" in x:
        x["beta"] = x["beta_limit"] * x["beta"].sigmoid()
    if x["gate"] is not None:
        x["g"] = log_gates(x["g"], x["gate"], x.get("A_log"), x.get("dt_bias"), x.get("bound"))
    return x


def log_gates(g, gate, A_log, dt_bias, bound):
    """Returns log gates from logits; those that are infinite stand for gates of -inf, and have no gradient."""
    is_closed = g.isinf()
    g = g.where(~is_closed, 0)
    rate, bias = (0 if y is None else y[:, None] if y.ndim == 1 and g.ndim == 4 else y for y in (A_log, dt_bias))
    rate = torch.as_tensor(rate).exp()
    if gate == "logsigmoid":
        g = F.logsigmoid(g) / 16
    elif gate == "softplus":
        g = -rate * F.softplus(g + bias, threshold=1000)
    else:
        g = bound * torch.sigmoid(rate * (g + bias))
    return g.where(~is_closed, -torch.inf)
