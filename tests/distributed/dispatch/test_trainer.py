"""single_rank_load in training: the same global batches and the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.dispatch import SingleRankLoader
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.pipeline import balanced
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.data import train_and_eval_loaders
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.models.torchrec_model import AveragedSGD, weights_of
from tests.helpers.pipelines.shuffled_pipelines import steps_of

CPU = torch.device("cpu")
OWN, IN_TURN, BALANCED = "own", "in turn", "balanced"


def trainer_args(how):
    return TrainerArgs(
        8 // dist.get_world_size(),
        4,
        single_rank_load=how != OWN,
        balance_batch=how == BALANCED,
        sinks=(),
        log_interval=1,
    )


def dataset(data):
    return DatasetArgs("ml-1m", 200, data, max_num_candidates=2, shuffle=True)


def make_loader(data, trainer, shuffler):
    loader, _ = train_and_eval_loaders(dataset(data), trainer, CPU)
    get_workloads = shuffler.get_workloads if trainer.balance_batch else None
    return loader, SingleRankLoader(loader, get_workloads) if trainer.single_rank_load else None


def make_config(loader):
    hstu = HSTUConfig(8, 1, 2, 4, max_sequence_length=loader.dataset.max_sequence_length)
    return RankingConfig(hstu, loader.dataset.vocabulary_sizes, (8, 1), 1)


def train_plain(data, how):
    """Every batch of this rank, the loads of all of them, and the weights, of an epoch on plain float64 tables.

    The last step of the 59 rows has fewer than there are ranks, of four.
    """
    workloads = HSTUBalancedBatchShuffler(8, 2, 4, 1)
    loader, dealt = make_loader(data, trainer_args(how), workloads)
    torch.manual_seed(0)
    model = HSTURankingModel(make_config(loader), plain_embeddings=True).double()
    shuffler = IdentityBalancedBatchShuffler()
    pipeline = balanced(TrainPipelineBase)(model, AveragedSGD(model.parameters(), lr=0.2), CPU, batch_shuffler=shuffler)
    seen, loads = [], []

    def watch():
        for batch in loader if dealt is None else dealt:
            seen.append((batch.batch_size, rows_as_values(batch)))
            loads.append(int(workloads.get_workloads(batch)[: batch.actual_batch_size].sum()))
            yield batch

    list(steps_of(pipeline, watch()))
    for user in (workloads, shuffler, dealt):
        if user is not None:
            user.close()
    return seen, loads, weights_of(model)


def test_the_weights_do_not_depend_on_who_loads(ranks, data):
    results = {how: ranks.run(train_plain, data, how) for how in (OWN, IN_TURN, BALANCED)}
    batches = {how: [seen for seen, _, _ in result] for how, result in results.items()}
    # One row to each rank in turn is what the sampler of each rank does: the very same batches. Ranks that are left
    # without a row in the last step get padding, where with a loader of their own they have ended.
    with_rows = [[batch for batch in seen if batch[1]] for seen in batches[IN_TURN]]
    assert with_rows == batches[OWN] and {len(seen) for seen in batches[IN_TURN]} == {8}
    size = 8 // ranks.world_size
    for how in (OWN, IN_TURN, BALANCED):
        assert all({batch_size for batch_size, _ in seen} == {size} for seen in batches[how])
    for step in range(8):
        rows = {how: sorted(row for seen in batches[how] for row in seen[step][1]) for how in (IN_TURN, BALANCED)}
        assert rows[BALANCED] == rows[IN_TURN] and len(rows[IN_TURN]) == (3 if step == 7 else 8)
    largest = {
        how: sum(max(loads) for loads in zip(*(loads for _, loads, _ in results[how]))) for how in (IN_TURN, BALANCED)
    }
    assert largest[BALANCED] < 0.97 * largest[IN_TURN]
    own = results[OWN][0][2]
    for how in (IN_TURN, BALANCED):
        found = results[how][0][2]
        assert max(float((found[name] - own[name]).abs().max()) for name in own) < 1e-12
