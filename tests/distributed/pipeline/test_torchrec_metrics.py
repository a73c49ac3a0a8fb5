"""torchrec.metrics on rows that have moved: which of them stay the same, as docs/torchrec_model.md says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecTaskInfo, SessionMetricDef
from torchrec.metrics.metrics_config import RecMetricEnum as Metric
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.sequence_batch.batch import BaseBatch
from tests.helpers.ranks.on_ranks import on_two_ranks

ROWS, STEPS, IN_SESSION = 8, 6, 4


@dataclass
class Scored(BaseBatch):
    prediction: torch.Tensor = field(kw_only=True)
    session: torch.Tensor = field(kw_only=True)


class BySession(TokensBalancedBatchShuffler):
    def get_groups(self, batch):
        return batch.session


def _draw(step: int) -> Scored:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    lengths = (torch.randn(ROWS, generator=generator) + 2).exp().long()
    session = torch.arange(ROWS) // IN_SESSION + 10 * (2 * step + dist.get_rank())
    labels, prediction = torch.rand(2, ROWS, generator=generator)
    features = KeyedJaggedTensor(["item"], torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths=lengths)
    return Scored(features, labels=labels.round(), prediction=prediction, session=session)


def _values(metric: Metric, batches: list[Scored]) -> torch.Tensor:
    sessions = SessionMetricDef("session", top_threshold=2) if metric == Metric.RECALL_SESSION_LEVEL else None
    task = RecTaskInfo("task", "label", "prediction", "weight", session_metric_def=sessions)
    options = {"session_key": "session"} if metric == Metric.NDCG else None
    computed = {metric: RecMetricDef([task], window_size=10_000, arguments=options)}
    config = MetricsConfig([task], computed, compute_on_all_ranks=True)
    numbers = ROWS, dist.get_world_size(), dist.get_rank()
    module = generate_metric_module(RecMetricModule, config, *numbers, {}, torch.device("cpu"))
    for batch in batches:
        real = slice(batch.actual_batch_size)
        outputs = {"label": batch.labels, "prediction": batch.prediction, "session": batch.session}
        outputs["weight"] = torch.ones(batch.batch_size)
        module.update({name: value[real] for name, value in outputs.items()})
    return torch.tensor([float(value) for value in module.compute().values()], dtype=torch.float64)


@pytest.mark.parametrize(
    ("metric", "same", "same_by_session"),
    [
        (Metric.NE, True, True),
        (Metric.AUC, True, True),
        (Metric.NDCG, False, True),
        (Metric.RECALL_SESSION_LEVEL, False, True),
        (Metric.XAUC, False, False),
    ],
)
@on_two_ranks
def test_metrics_of_sessions_need_their_rows_together(metric, same, same_by_session):
    batches = [_draw(step) for step in range(STEPS)]
    as_loaded = _values(metric, batches)
    free = ShufflerOptions(equal_size=False)
    for shuffler, expected in ((TokensBalancedBatchShuffler(), same), (BySession(options=free), same_by_session)):
        moved = _values(metric, [shuffler.shuffle(batch) for batch in batches])
        shuffler.close()
        assert torch.allclose(moved, as_loaded, atol=1e-6) == expected
