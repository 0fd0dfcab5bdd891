"""Functions of flash-linear-attention that are a delta rule, against the oracle and against its own naive functions."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from gla_core.compat import fla
from gla_core.compat.fla import delta
from gla_core.conformance import oracle

T, H, K, V = 11, 2, 5, 3
FUNCTIONS = {
    "kda": (fla.chunk_kda, fla.fused_recurrent_kda),
    "gated_delta_rule": (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule),
    "delta_rule": (fla.chunk_delta_rule, fla.fused_recurrent_delta_rule),
}
UNIT, SIGMOID = {"use_qk_l2norm_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}
LOGITS, BOUND = {"use_gate_in_kernel": True}, {"lower_bound": -2.0}
FORMS = {
    "kda": [{}, UNIT | LOGITS | SIGMOID, LOGITS | BOUND | {"safe_gate": True}, LOGITS | BOUND | {"A_log": None}],
    "gated_delta_rule": [{"scale": 0.3}, UNIT | LOGITS | SIGMOID | {"allow_neg_eigval": True}],
    "delta_rule": [{}, UNIT],
}
CASES = [(family, form, groups) for family in FORMS for form in FORMS[family] for groups in (1, 2)[: len(form) + 1]]
CASES = [(*case, lengths) for case in CASES for lengths in (None, [4, 0, 7])]


def inputs(family, form, groups, lengths, dtype=torch.float64):
    """Returns the tensors of a call by name, with gradients; betas are up to 2 unless they are logits."""
    torch.manual_seed(0)
    B, heads = 2 if lengths is None else 1, H * groups
    x = {name: torch.randn(B, T, h, d) for name, h, d in (("q", H, K), ("k", H, K), ("v", heads, V))}
    x["k"] = F.normalize(x["k"], dim=-1) * (2 if UNIT.keys() & form else 1)
    beta = torch.randn(B, T, heads)
    x["beta"] = beta if SIGMOID.keys() & form else 2 * beta.sigmoid()
    x["initial_state"] = torch.randn(B if lengths is None else len(lengths), heads, K, V)
    if family != "delta_rule":
        g = torch.randn(B, T, heads, *[K] * (family == "kda"))
        x["g"] = g if LOGITS.keys() & form else -g.exp()
    if LOGITS.keys() & form:
        x |= {"A_log": torch.randn(heads), "dt_bias": torch.randn(g.shape[2:]).flatten()}
    return {name: y.to(dtype).requires_grad_() for name, y in x.items() if form.get(name, y) is not None}


def call(function, x, form, lengths=None, **more):
    """Calls a function with those of its arguments that are here."""
    known = {*inspect.signature(function).parameters, *(["use_gate_in_kernel", "A_log", "dt_bias"] if "g" in x else [])}
    options = {"output_final_state": True, **form, **more}
    if lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return function(**{name: y for name, y in {**x, **options}.items() if name in known})


def expected(naive, family, x, form, lengths):
    """Computes what a naive function of tokens, scale and state returns for the forms."""
    q, k, v, g, beta = (x.get(name) for name in ("q", "k", "v", "g", "beta"))
    if UNIT.keys() & form:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if LOGITS.keys() & form:
        logits, bound = g + x["dt_bias"].view(g.shape[2:]), form.get("lower_bound")
        rate = x["A_log"].exp().view(-1, *[1] * (g.ndim - 3)) if "A_log" in x else 1
        g = -rate * F.softplus(logits) if bound is None else bound * torch.sigmoid(rate * logits)
    if SIGMOID.keys() & form:
        beta = beta.sigmoid() * (2 if "allow_neg_eigval" in form else 1)
    tokens, scale, state = (q, k, v, g, beta), form.get("scale", q.shape[-1] ** -0.5), x["initial_state"]
    if lengths is None:
        return naive(family, *tokens, scale, state)
    parts = zip(*([None] * len(lengths) if y is None else y.split(lengths, 1) for y in tokens), strict=True)
    results = [
        naive(family, *part, scale, before) if n else (part[2], before)
        for part, before, n in zip(parts, state.split(1), lengths, strict=True)
    ]
    return torch.cat([o for o, _ in results], 1), torch.cat([state for _, state in results])


def by_definition(family, *arguments):
    return oracle.chunk_delta(*arguments)


def by_fla(family, q, k, v, g, beta, scale, state):
    """Calls flash-linear-attention's naive function, which computes in float32."""
    if family == "kda":
        from fla.ops.kda.naive import naive_recurrent_kda

        return naive_recurrent_kda(q, k, v, g, beta, scale, state, True)
    q, k = (y.repeat_interleave(v.shape[2] // q.shape[2], 2) for y in (q, k))
    if family == "gated_delta_rule":
        from fla.ops.gated_delta_rule import naive_recurrent_gated_delta_rule

        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, state, True)
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    o, state = delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, k, v, beta)), state)
    return o.transpose(1, 2), state


def with_gradients(results, x):
    """Returns results, and the gradients of a sum of them with fixed weights by the names of the inputs."""
    torch.manual_seed(1)
    weights = [torch.randn(y.shape, dtype=y.dtype) for y in results]
    return results, dict(zip(x, torch.autograd.grad(results, list(x.values()), weights), strict=True))


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("family", "form", "groups", "lengths"), CASES, ids=str)
def test_values_states_and_gradients(family, form, groups, lengths):
    x = inputs(family, form, groups, lengths)
    wanted = with_gradients(expected(by_definition, family, x, form, lengths), x)
    for function in FUNCTIONS[family]:
        close(with_gradients(call(function, x, form, lengths), x), wanted)


@pytest.mark.parametrize(("family", "form", "groups", "lengths"), CASES, ids=str)
def test_they_are_those_of_its_naive_functions(family, form, groups, lengths):
    pytest.importorskip("fla.ops.kda", reason="needs flash-linear-attention 0.6.0: make test-fla")
    x = inputs(family, form, groups, lengths, torch.float32)
    wanted = with_gradients(expected(by_fla, family, x, form, lengths), x)
    for function in FUNCTIONS[family]:
        close(with_gradients(call(function, x, form, lengths), x), wanted, 1e-4)


@pytest.mark.parametrize("family", FUNCTIONS)
def test_one_token_without_gradients_is_a_step(monkeypatch, family):
    seen, step = [], delta._recurrent_delta_step
    monkeypatch.setattr(delta, "_recurrent_delta_step", lambda *args, **kw: seen.append(1) or step(*args, **kw))
    form, (_, function) = FORMS[family][1], FUNCTIONS[family]
    x = inputs(family, form, 1, None)
    token = {name: y[:, :1] if name in ("q", "k", "v", "g", "beta") else y for name, y in x.items()}
    wanted = expected(by_definition, family, token, form, None)
    close(call(function, token, form), wanted)
    assert not seen  # also the parameters of the gates ask for gradients
    with torch.no_grad():
        close(call(function, token, form), wanted)
        assert call(function, token, form, initial_state=None, output_final_state=False)[1] is None
    assert seen == [1, 1]


@pytest.mark.parametrize("family", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("tokens", [1, T])
def test_values_first(family, tokens):
    form = FORMS[family][1]
    x = {name: y.detach() for name, y in inputs(family, form, 2, None).items()}
    x |= {name: x[name][:, :tokens] for name in ("q", "k", "v", "g", "beta")}
    x["A_log"] = x["A_log"].view(1, 1, -1, 1)  # the shape in checkpoints of Kimi Linear
    for function in FUNCTIONS[family]:
        o, state = call(function, x, form)
        passed = {**x, "initial_state": x["initial_state"].mT.contiguous()}
        close(call(function, passed, form | {"state_v_first": True}), (o, state.mT))
        with pytest.warns(DeprecationWarning, match="pass state_v_first"):
            close(function(**passed, **form, output_final_state=True, transpose_state_layout=True), (o, state.mT))


def test_states_are_computed_again_unless_told_otherwise(monkeypatch):
    seen, op = [], delta._chunk_delta

    def spied(*args, **kw):
        seen.append((kw["recompute_states"], kw["max_seqlen"]))
        return op(*args, **kw)

    monkeypatch.setattr(delta, "_chunk_delta", spied)
    x, lengths = inputs("kda", {}, 1, [4, 7]), [4, 7]
    offsets = torch.tensor([0, 4, 11])
    call(fla.chunk_kda, x, {}, lengths, cu_seqlens_cpu=offsets)
    call(fla.chunk_kda, x, {}, lengths, disable_recompute=True)
    call(fla.fused_recurrent_kda, x, {}, lengths)
    assert seen == [(True, 7), (False, None), (True, None)]


@pytest.mark.parametrize("tokens", [1, T])
def test_tokens_and_states_of_different_dtypes(tokens):
    form = FORMS["kda"][1]
    x = {name: y.detach() for name, y in inputs("kda", form, 1, None, torch.float32).items()}
    x |= {name: x[name][:, :tokens] for name in ("q", "k", "v", "g", "beta")}
    wanted = call(fla.chunk_kda, x, form)
    x |= {"v": x["v"].half(), "beta": x["beta"].bfloat16(), "initial_state": x["initial_state"].bfloat16()}
    for function in FUNCTIONS["kda"]:
        o, state = call(function, x, form)
        assert (o.dtype, state.dtype) == (torch.float16, torch.float32)
        torch.testing.assert_close((o.float(), state), wanted, rtol=0.02, atol=0.02)


def test_gates_and_betas_that_are_left_out():
    x = {name: y.detach() for name, y in inputs("kda", {}, 1, None).items()}
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    o, _ = fla.fused_recurrent_gdn(q, k, v, gk=g, beta=beta)
    close(o, fla.chunk_kda(q, k, v, g, beta)[0])
    close(fla.fused_recurrent_gdn(q, k, v)[0], fla.chunk_delta_rule(q, k, v, torch.ones_like(beta))[0])
    close(fla.fused_recurrent_delta_rule(q, k, v)[0], fla.chunk_delta_rule(q, k, v, torch.ones_like(beta))[0])
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule


def test_what_is_refused():
    x = {name: y.detach() for name, y in inputs("kda", {}, 1, None).items()}
    q, k, v, g, beta = tokens = [x[name] for name in ("q", "k", "v", "g", "beta")]
    recurrent = fla.fused_recurrent_gated_delta_rule
    for function, more, match in (
        (fla.chunk_kda, {"cp_context": 1}, r"context parallelism \(cp_context\): not computed here; call .* chunk_kda"),
        (fla.chunk_kda, {"return_intermediate_states": True}, "states inside sequences: not computed here"),
        (fla.chunk_gated_delta_rule, {"cp_context": 1}, "context parallelism"),
        (recurrent, {"beta": v}, "a beta for each value: not computed here"),
        (recurrent, {"gv": v}, r"gates of values \(gv\): not computed here"),
        (recurrent, {"gk": g}, r"a gate for each key \(gk\) beside one for each head \(g\)"),
        (fla.fused_recurrent_kda, {"beta": v}, "a beta for each value"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            function(**{**dict(zip("qkvg", (q, k, v, g), strict=True)), "beta": beta, **more})
    with pytest.raises(NotImplementedError, match="a beta for each value"):
        fla.fused_recurrent_delta_rule(q, k, v, v)
    for function in (fla.chunk_kda, fla.fused_recurrent_kda, fla.chunk_gated_delta_rule):
        with pytest.raises(ValueError, match=r"A_log is None; expected a tensor \[Hv\]"):
            function(*tokens, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="g is None; expected the logits of the gates as g"):
        recurrent(q, k, v, gk=g, use_gate_in_kernel=True, A_log=beta)
    with pytest.raises(ValueError, match="allow_neg_eigval is set; expected use_beta_sigmoid_in_kernel too"):
        fla.chunk_kda(*tokens, allow_neg_eigval=True)
    with pytest.raises(TypeError, match="chunk_delta_rule takes no argument 'head_first'"):
        fla.chunk_delta_rule(q, k, v, beta, chunk_size=32, head_first=False)


MODELS = [
    ("KDA", "kda", {"num_heads": 2, "num_v_heads": 4, "head_dim": 8}),
    ("KDA", "kda", {"num_heads": 2, "head_dim": 8, "safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True}),
    ("GatedDeltaNet", "gated_delta_rule", {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "allow_neg_eigval": True}),
    ("DeltaNet", "delta_rule", {"num_heads": 2, "allow_neg_eigval": True}),
]


def in_place_of_kernels(family):
    """Returns a function that takes what the layers pass, and calls flash-linear-attention's naive function."""

    def function(**x):
        state, offsets, v_first = (x.pop(name, None) for name in ("initial_state", "cu_seqlens", "state_v_first"))
        form = {
            name: y for name, y in x.items() if y is not None and not isinstance(y, torch.Tensor) and y is not False
        }
        q, v, lengths = x["q"], x["v"], None if offsets is None else offsets.diff().tolist()
        if state is None:
            state = q.new_zeros(len(lengths or q), v.shape[2], q.shape[3], v.shape[3])
        elif v_first:
            state = state.mT
        o, state = expected(by_fla, family, {**x, "initial_state": state}, form, lengths)
        return o, state.mT if v_first else state

    return function


@pytest.mark.filterwarnings("ignore:.*attention mask")
@pytest.mark.parametrize(("name", "family", "options"), MODELS, ids=str)
def test_models_compute_what_they_compute_with_its_naive_functions(monkeypatch, name, family, options):
    """Logits, loss, gradients and text before and after `accelerate`, with padding and from a cache."""
    models = pytest.importorskip("fla.models", reason="needs flash-linear-attention 0.6.0: make test-fla")
    config = getattr(models, f"{name}Config")(
        hidden_size=32, num_hidden_layers=2, vocab_size=61, intermediate_size=48, pad_token_id=0, **options
    )
    torch.manual_seed(0)
    model, tokens = getattr(models, f"{name}ForCausalLM")(config), torch.randint(3, 61, (2, 70))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0

    def results():
        model.zero_grad()
        model.train()
        out = model(tokens, attention_mask=mask, labels=tokens)
        out.loss.backward()
        gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        model.eval()
        with torch.no_grad():
            text = [
                model.generate(tokens[:, -n:], attention_mask=mask[:, -n:], max_new_tokens=6, do_sample=False)
                for n in (70, 66)
            ]
            logits = model(tokens, attention_mask=mask).logits
        return text, (out.loss.detach(), logits, gradients)

    layers = importlib.import_module(type(model.model.layers[0].attn).__module__)
    with fla.accelerate(cpu=True):
        with monkeypatch.context() as patch:
            for function in FUNCTIONS[family]:
                patch.setattr(layers, function.__name__, in_place_of_kernels(family))
            text, wanted = results()
        again, actual = results()
    torch.testing.assert_close(again, text, rtol=0, atol=0)
    close(actual, wanted, 1e-4)
