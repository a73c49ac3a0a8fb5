"""Formulas of operations against torch's counter, over references that compute exactly what the mask keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model.attention_pairs import attention_pairs
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask, training_flops


def kept_keys(query, length, targets, contextual, causal, group):
    """Keys that one query sees."""
    history = length - targets
    if not causal:
        return list(range(length))
    if query < contextual:
        return list(range(history))
    if query < history:
        return list(range(query + 1))
    first = history + (query - history) // group * group
    return [*range(history), *range(first, query + 1)]


def attend(q, k, v, masks, activation):
    """Attention of one row, one query at a time over its own keys; q `(heads, length, dim)`."""
    out = []
    for query, keys in enumerate(masks):
        scores = activation(torch.bmm(q[:, query : query + 1], k[:, keys].transpose(1, 2)))
        out.append(torch.bmm(scores, v[:, keys]))
    return torch.cat(out, dim=1)


def heads_first(x, heads, dim):
    return x.view(-1, heads, dim).transpose(0, 1)


def hstu_layers(lengths, masks, h, heads, d, layers):
    p = heads * d
    weights = [
        (torch.randn(h, 4 * p, requires_grad=True), torch.randn(p, h, requires_grad=True)) for _ in range(layers)
    ]
    x = torch.randn(sum(lengths), h, requires_grad=True)
    for first, last in weights:
        rows = []
        for part, mask in zip(torch.mm(x, first).split(lengths), masks):
            u, v, q, k = part.chunk(4, dim=1)
            attended = attend(*(heads_first(each, heads, d) for each in (q, k, v)), mask, torch.nn.functional.silu)
            rows.append(attended.transpose(0, 1).reshape(-1, p) * u)
        x = torch.mm(torch.cat(rows), last)
    return x


def transformer_layers(lengths, masks, h, heads, d, layers, groups, ffn, gated, experts, active, vocab):
    p, kv = heads * d, groups * d
    x = torch.randn(sum(lengths), h, requires_grad=True)

    def weight(*shape):
        return torch.randn(*shape, requires_grad=True)

    for _ in range(layers):
        qkv, out = weight(h, p + 2 * kv), weight(p, h)
        rows = []
        for part, mask in zip(torch.mm(x, qkv).split(lengths), masks):
            q, k, v = part.split([p, kv, kv], dim=1)
            q, k, v = heads_first(q, heads, d), heads_first(k, groups, d), heads_first(v, groups, d)
            k, v = (each.repeat_interleave(heads // groups, dim=0) for each in (k, v))
            rows.append(attend(q, k, v, mask, lambda s: s.softmax(-1)).transpose(0, 1).reshape(-1, p))
        x = torch.mm(torch.cat(rows), out)
        blocks = []
        for _ in range(active):  # every token passes `active` blocks
            up = torch.mm(x, weight(h, ffn))
            if gated:
                up = up * torch.mm(x, weight(h, ffn))
            blocks.append(torch.mm(up, weight(ffn, h)))
        if experts > 1:
            blocks.append(torch.mm(x, weight(h, experts)).sum(dim=1, keepdim=True))
        x = sum(blocks)
    return x if vocab is None else torch.mm(x, weight(h, vocab))


def count(function, *args):
    """Operations of the forward pass, and of forward and backward together."""
    with FlopCounterMode(display=False) as forward:
        out = function(*args)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize(
    "causal, group, targets, contextual",
    [
        (True, 1, [0, 3, 5], [0, 0, 0]),
        (True, 3, [0, 7, 5], [0, 0, 0]),
        (True, 2, [1, 4, 0], [2, 3, 6]),
        (False, 1, [0, 2, 5], [0, 0, 0]),
    ],
)
def test_hstu_operations_are_those_that_are_counted(causal, group, targets, contextual):
    h, heads, d, layers = 12, 3, 5, 2  # heads · dim is not the hidden size
    lengths = [4, 9, 6]
    masks = [
        [kept_keys(query, *row, causal, group) for query in range(row[0])] for row in zip(lengths, targets, contextual)
    ]
    task = HSTUAttentionTask(h, heads, d, layers, causal=causal, target_group_size=group)
    forward, both = count(hstu_layers, lengths, masks, h, heads, d, layers)
    workload = int(task.get_workloads(lengths, targets, contextual).sum())
    assert workload == forward and training_flops(workload) == both


@pytest.mark.parametrize(
    "groups, gated, experts, active, vocab",
    [(4, False, 1, 1, None), (2, True, 1, 1, 11), (1, True, 5, 2, None), (4, False, 3, 3, 7)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_operations_are_those_that_are_counted(groups, gated, experts, active, vocab, causal):
    h, heads, d, layers, ffn = 12, 4, 5, 2, 18
    lengths = [1, 8, 5]
    masks = [[kept_keys(query, length, 0, 0, causal, 1) for query in range(length)] for length in lengths]
    task = SelfAttentionTask(
        h,
        heads,
        d,
        layers,
        ffn_hidden_size=ffn,
        num_query_groups=groups,
        gated_ffn=gated,
        causal=causal,
        num_experts=experts,
        num_active_experts=active,
        vocab_size=vocab,
    )
    forward, both = count(
        transformer_layers, lengths, masks, h, heads, d, layers, groups, ffn, gated, experts, active, vocab
    )
    workload = int(task.get_workloads(lengths).sum())
    assert workload == forward and training_flops(workload) == both


@pytest.mark.parametrize("contextual", range(4))
@pytest.mark.parametrize("targets", range(3))
def test_contextual_tokens_see_all_but_the_targets(contextual, targets):
    length = 7
    kept = sum(len(kept_keys(query, length, targets, contextual, True, 1)) for query in range(length))
    assert attention_pairs(length, targets, contextual) == kept


def test_what_no_model_has_is_refused():
    with pytest.raises(ValueError, match="num_active_experts is 3, num_experts is 2"):
        SelfAttentionTask(8, 2, 4, num_experts=2, num_active_experts=3)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        SelfAttentionTask(8, 2, 4, vocab_size=0)
    with pytest.raises(ValueError, match="row 0 has 5 targets and contextual tokens in 4 tokens"):
        HSTUAttentionTask(8, 2, 4).get_workloads([4], [2], [3])
    with pytest.raises(ValueError, match="num_contextual holds -1"):
        HSTUAttentionTask(8, 2, 4).get_workloads([4], [2], [-1])
