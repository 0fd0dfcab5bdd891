"""Bugs in `online_softmax` and `softmax_attention`."""

import torch

from tests.conformance.bugs.plant import LATE, Op

softmax = Op("online_softmax")
softmax_gradient = Op("online_softmax_bwd")
attention = Op("softmax_attention", "o", "lse")
attention_gradients = Op("softmax_attention_bwd", "dq", "dk", "dv")


@softmax.bug("test_many_columns_keys_or_queries[many_columns-float32]")
def last_columns_left_out(x, y):
    y.narrow(x.dim, min(LATE, y.shape[x.dim]), max(0, y.shape[x.dim] - LATE)).zero_()


@softmax.bug("test_values[minus_infinity-float32]")
def nan_for_a_tile_of_minus_infinity(x):
    rows = x.x.movedim(x.dim, -1)
    m, z = rows.new_full((*rows.shape[:-1], 1), -torch.inf), rows.new_zeros(*rows.shape[:-1], 1)
    for tile in rows.split(256, -1):
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        z = z * torch.exp(m - m_new) + torch.exp(tile - m_new).sum(-1, keepdim=True)
        m = m_new
    return (torch.exp(rows - m) / z).movedim(-1, x.dim).contiguous()


@softmax.bug("test_large_values[small-float32-30000.0]")
def no_maximum_taken_off(x):
    return (x.x.exp() / x.x.exp().sum(x.dim, keepdim=True)).contiguous()


@attention.bug("test_many_columns_keys_or_queries[many_keys-float32]")
def late_keys_left_out(x):
    return attention(x, k=x.k[:, :LATE], v=x.v[:, :LATE], causal=x.causal and x.k.shape[1] <= LATE)


@attention.bug("test_values[small-float32]", over={"lse"})
def logarithm_to_base_two(x, y):
    y.lse = y.lse / torch.log(torch.tensor(2.0))


@attention.bug("test_values[odd-float32]")
def mask_aligned_at_the_first_key(x):
    Tq, Tk = x.q.shape[1], x.k.shape[1]
    return attention(x, k=x.k[:, :Tq], v=x.v[:, :Tq]) if x.causal and Tk > Tq else attention(x)


@softmax_gradient.bug("test_gradients[small-float32]")
def mean_of_dy_not_subtracted(x):
    y = torch.softmax(x.x.float(), x.dim)
    return (y * x.dy).to(x.x.dtype).contiguous()


@softmax_gradient.bug("test_gradients[small-float32]")
def plain_mean_of_dy_subtracted(x):
    y = torch.softmax(x.x.float(), x.dim)
    return (y * (x.dy - x.dy.mean(x.dim, keepdim=True))).to(x.x.dtype).contiguous()


@attention_gradients.bug("test_gradients[small-float32]", over={"dq", "dk"})
def gradient_of_lse_left_out(x):
    return attention_gradients(x, dlse=None)


@attention_gradients.bug("test_gradients[grouped-float32]", over={"dk", "dv"})
def last_head_of_a_group_left_out(x):
    y, groups = attention_gradients(x), x.q.shape[2] // x.k.shape[2]
    if groups > 1:
        last = torch.arange(x.q.shape[2]) % groups < groups - 1
        fewer = attention_gradients(x, do=x.do * last[:, None], dlse=None if x.dlse is None else x.dlse * last)
        y.dk, y.dv = fewer.dk, fewer.dv
    return y


@attention_gradients.bug("test_gradients[small-float32]")
def causal_gradients_one_key_off(x):
    y = attention_gradients(x)
    if x.causal and x.k.shape[1] > 1:
        earlier = attention_gradients(
            x,
            q=x.q[:, 1:],
            o=x.o[:, 1:],
            lse=x.lse[:, 1:],
            do=x.do[:, 1:],
            dlse=None if x.dlse is None else x.dlse[:, 1:],
            k=x.k[:, :-1],
            v=x.v[:, :-1],
        )
        y.dk[:, :-1], y.dv[:, :-1] = earlier.dk, earlier.dv
    return y
