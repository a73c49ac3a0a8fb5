"""Workloads of language models from their config: what verl hard-codes for one model comes out for it, up to scale."""

from __future__ import annotations

import numpy as np
import pytest

from commons.perf_model.task_estimator import SelfAttentionTask

HIDDEN, HEADS, HEAD_DIM = 4096, 32, 128
# Full attention, as the constants below count it; a causal model computes half of these pairs.
LLAMA = {"num_layers": 32, "causal": False}


def ratio_of_terms(task):
    """The factor r with which `task`'s workload is r·L + L², up to scale."""
    lengths = np.array([1, 2, 3, 1000, 4096])
    one, two, *_ = workloads = task.get_workloads(lengths).tolist()
    quadratic = (two - 2 * one) // 2
    linear = one - quadratic
    assert workloads == (linear * lengths + quadratic * lengths**2).tolist()
    assert linear % quadratic == 0
    return linear // quadratic


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        # Q, K, V and output 4·2h², feed-forward 4·h·4h, attention 4·h·L²: 6h·L + L², as verl has it.
        (LLAMA, 24576),
        # Llama 7B has a gated block: 2h·L of the projections, 1.5·11008·L of the three matrices.
        (LLAMA | {"ffn_hidden_size": 11008, "gated_ffn": True}, 2 * HIDDEN + 3 * 11008 // 2),
        # The published 33024·L + L² is 3·11008·L for the three matrices, over half of the pairs. It leaves out the
        # projections, 4h·L, a third of the linear work; the L(L + 1) ÷ 2 pairs of the mask add one more to the ratio.
        ({"num_layers": 32, "ffn_hidden_size": 11008, "gated_ffn": True}, 33024 + 4 * HIDDEN + 1),
        # K and V are projected for as many heads as there are groups.
        (LLAMA | {"num_query_groups": 8}, 24576 - HIDDEN * (HEADS - 8) // HEADS),
        (LLAMA | {"num_query_groups": 1}, 24576 - HIDDEN * (HEADS - 1) // HEADS),
    ],
)
def test_the_constants_of_other_packages_come_out_of_dimensions(options, ratio):
    assert ratio_of_terms(SelfAttentionTask(HIDDEN, HEADS, HEAD_DIM, **options)) == ratio
