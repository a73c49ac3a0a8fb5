"""The semantic-ID decoder: against plain PyTorch, cached decoding, metrics over all ranks, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.models.beam_search import generate_without_cache
from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution
from commons.datasets.sids.dataset import CANDIDATE, HISTORY
from commons.trainer.sharding import dense_parameters
from sid_gr.metrics import GenerationMetrics
from sid_gr.model import SIDGRModel, SIDTrie
from sid_gr.parallel import initialize_model_parallel
from sid_gr.sharding import build_distributed_model
from tests.helpers.models.sid_models import (
    CPU,
    MAX_CANDIDATES,
    MAX_HISTORY,
    SID_MAP,
    SIZES,
    PlainDecoder,
    build_sharded,
    codes_of_rows,
    make_batch,
    make_model,
    metric_of_user,
    model_parallel,
)
from tests.helpers.pipelines.shuffled_pipelines import before_a_commit
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

METRICS = ["HitRate@1", "HitRate@5", "NDCG@5", "Recall@3"]


def table_of(model: SIDGRModel) -> torch.Tensor:
    (table,) = model.embedding.parameters()
    return table


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max())


@pytest.mark.parametrize("heads", before_a_commit(["separate"], ["shared"]))
@pytest.mark.parametrize(
    ("dtype", "most_of_loss", "most_of_gradient"),
    [(torch.float64, 1e-13, 1e-6), (torch.float32, 1e-6, 1e-5)],  # the table and its gradient are float32
)
@on_two_ranks
def test_loss_and_gradients_are_those_of_plain_pytorch(heads, dtype, most_of_loss, most_of_gradient):
    """Over batches with padding and empty histories."""
    with model_parallel():
        for seed in range(3):
            model = make_model(heads=heads)
            model.dense.to(dtype)
            plain = PlainDecoder(model.dense, table_of(model))
            batch = make_batch(seed, num_real=6 - seed)
            loss, output = model(batch)
            loss.backward()
            expected = plain.loss_sum(batch)
            # Both ranks bring the same batch: W × own sum ÷ global count is own sum ÷ own count.
            (expected / output.num_loss_tokens).backward()
            assert output.num_loss_tokens == sum(codes.numel() for codes in codes_of_rows(batch, CANDIDATE)) > 0
            assert float(output.loss_sum) == pytest.approx(float(expected), rel=most_of_loss, abs=0)
            pairs = [(parameter.grad, plain.weights[name].grad) for name, parameter in model.dense.named_parameters()]
            for found, wanted in (*pairs, (table_of(model).grad, plain.table.grad)):
                assert _largest(found, 0 if wanted is None else wanted) < most_of_gradient


@on_two_ranks
def test_groups_of_ranks_that_are_bound_to_a_device_connect_when_they_are_used():
    """To one that is not here: torch connects a new group at once where its device is given."""
    world, bound = dist.group.WORLD, torch.device("cuda", 3)
    world.bound_device_id = bound
    made = len(dist.distributed_c10d._world.pg_names)
    try:
        with model_parallel(2):
            groups = list(dist.distributed_c10d._world.pg_names)[made:]
            assert len(groups) > 10 and {group.bound_device_id for group in groups} == {None}
            assert world.bound_device_id == bound
    finally:
        world.bound_device_id = None


@on_two_ranks
def test_generation_equals_enumeration_and_cached_decoding_equals_uncached():
    with model_parallel():
        _compare_with_enumeration()
        for seed in range(3):
            model = make_model(beam_width=7).eval()
            batch = make_batch(seed, batch_size=5, num_real=5 - seed)
            cached, uncached = model.generate(batch), generate_without_cache(model, batch)
            assert cached.leaves.shape == (5 - seed, 7)
            assert torch.equal(cached.leaves, uncached.leaves)
            assert _largest(cached.log_probs, uncached.log_probs.double()) < 1e-5
            # What a row gets does not depend on its candidates, nor on the rows beside it.
            alone = model.generate(batch.index_select([0]))
            assert torch.equal(alone.leaves[0], cached.leaves[0])
            _, output = model(batch)
            assert torch.equal(output.generated.leaves, cached.leaves)


def _compare_with_enumeration():
    """A beam as wide as there are items ranks all of them, as enumeration does."""
    model = make_model(beam_width=SID_MAP.num_items).eval()
    plain = PlainDecoder(model.dense, table_of(model))
    batch = make_batch(5)
    found = model.generate(batch)
    for row, history in enumerate(codes_of_rows(batch, HISTORY)):
        ranking, scores = plain.ranking(history, model.trie.sids)
        assert found.leaves[row].tolist() == ranking
        assert _largest(found.log_probs[row], scores[ranking]) < 1e-5


@on_two_ranks
def test_a_sharded_table_generates_whatever_the_keys_of_the_batch():
    """In another order, and with a contextual feature, which the model does not use."""
    with model_parallel():
        batch = make_batch(1 + dist.get_rank())
        context = KeyedJaggedTensor.from_lengths_sync(["age"], *torch.ones(2, 6, dtype=torch.int64))
        history, candidates = batch.features.split([1, 1])
        expected = build_sharded("row_wise").eval().module.generate(batch)
        other = dataclasses.replace(
            batch,
            features=KeyedJaggedTensor.concat([candidates, context, history]),
            feature_to_max_seqlen=batch.feature_to_max_seqlen | {"age": 1},
            contextual_feature_names=["age"],
        )
        found = build_sharded("row_wise").eval().module.generate(other)
        assert torch.equal(found.leaves, expected.leaves) and torch.equal(found.log_probs, expected.log_probs)


def share(batch):
    """This rank's rows, unevenly many; the last rank has padding alone."""
    rank, owners = dist.get_rank(), dist.get_world_size() - 1
    rows = [row for row in range(batch.batch_size) if rank < owners and row * row % owners == rank]
    kept = batch.index_select(rows or [0])
    if rows:
        return kept
    return make_batch(0, batch_size=2, num_real=0)


@pytest.mark.parametrize("sharding", before_a_commit(["row_wise"], ["table_wise"]))
@on_ranks
def test_every_user_counts_once_on_any_number_of_ranks(sharding):
    with model_parallel():
        plain_model = make_model(beam_width=SID_MAP.num_items).eval()
        plain = PlainDecoder(plain_model.dense, table_of(plain_model))
        model = build_sharded(sharding, beam_width=SID_MAP.num_items).eval()
        metrics = GenerationMetrics(METRICS, SID_MAP.num_items)
        values = {name: [] for name in METRICS}
        for batch in (make_batch(seed, batch_size=9) for seed in range(2)):
            with torch.no_grad():
                _, output = model(share(batch))
            metrics.update(output)
            for history, future in zip(codes_of_rows(batch, HISTORY), codes_of_rows(batch, CANDIDATE)):
                if not len(future):
                    continue
                ranking, _ = plain.ranking(history, plain_model.trie.sids)
                true = set(plain_model.trie.lookup(future).tolist())
                for name in METRICS:
                    values[name].append(metric_of_user(name, ranking, true))
        expected = {name: statistics.fmean(of_users) for name, of_users in values.items()}
        errors = {f"{name}_se": statistics.pstdev(each) / math.sqrt(len(each)) for name, each in values.items()}
        assert metrics.compute() == metrics.compute() == pytest.approx(expected | errors, abs=1e-9)
        assert 0 < expected["HitRate@5"] < 1


@on_two_ranks
def test_every_true_item_counts_also_items_that_cannot_be_generated():
    with model_parallel(), torch.no_grad():
        model = make_model().eval()
        batch = make_batch(0, batch_size=1, candidate_dist=RandomDistribution("uniform", low=3, high=3))
        invalid = [sid for sid in itertools.product(*map(range, SIZES)) if sid not in set(map(tuple, SID_MAP.codes))]
        codes = torch.tensor([invalid[0], invalid[1], invalid[0]])
        batch.labels = KeyedJaggedTensor(batch.labels.keys(), codes.flatten(), lengths=batch.labels.lengths())
        _, output = model(batch)
        first, second, again = output.candidates.tolist()
        assert max(first, second) < 0 and first == again != second


@on_two_ranks
def test_gradients_are_averaged_and_accumulate():
    """Until they are cleared; a forward pass alone changes nothing."""
    with model_parallel():
        model = build_sharded("row_wise", embedding_lr=1e-30)
        batch = make_batch(3 + dist.get_rank())
        parameters = dense_parameters(model)
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)

        def gradients():
            loss, _ = model(batch)
            loss.backward()
            return {name: parameter.grad.clone() for name, parameter in parameters.items()}

        first = gradients()
        optimizer.zero_grad()
        own = make_model()
        loss, _ = own(batch)
        loss.backward()
        for name, parameter in own.dense.named_parameters():
            average = parameter.grad.clone()
            dist.all_reduce(average)
            torch.testing.assert_close(first[f"dense.{name}"], average / 2, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            model.eval()(batch)
        model.train()
        # The first pass has trained the table, at a rate of next to nothing: the second one sees the same weights.
        second = gradients()
        assert len(first) > 20 and all(_largest(second[name], first[name].double()) < 1e-6 for name in first)
        found = gradients()
        assert all(_largest(found[name], 2 * first[name].double()) < 1e-6 for name in first)


@pytest.mark.parametrize("everywhere", [False, True])
@on_two_ranks
def test_no_rows_on_a_rank_or_on_all(everywhere):
    empty = everywhere or dist.get_rank() == 0
    with model_parallel():
        model = build_sharded("row_wise")
        batch = make_batch(0, batch_size=3, num_real=0) if empty else make_batch(1)
        loss, output = model(batch)
        loss.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in dense_parameters(model).values())
        with torch.no_grad():
            generated = model.eval()(batch)[1].generated.leaves.shape
        assert (output.num_loss_tokens == 0) == empty
        assert not empty or (float(loss), generated) == (0.0, (0, 5))


@on_two_ranks
def test_mistakes():
    def require(said, call, *args, **kwargs):
        assert said in (text := error_of(call, *args, **kwargs)), text

    require("RuntimeError: megatron-core's parallel_state is not initialised", make_model)
    require("ValueError: tensor_model_parallel_size is 3, there are 2 ranks", initialize_model_parallel, 3)
    with model_parallel():
        model, other, trie = make_model(), make_batch(0), SIDTrie(SID_MAP.codes, (5, 3, 6))
        other.num_hierarchies, other.codebook_sizes = 1, None
        said = "ValueError: tensor_model_parallel_size is 2, the groups were made for 1"
        require(said, make_model, tensor_model_parallel_size=2)
        require("beam_width (trainer.top_k_for_generation) is 24, there are 23 valid SIDs", make_model, beam_width=24)
        require("beam_width (trainer.top_k_for_generation) is 0, there are 23 valid SIDs", make_model, beam_width=0)
        said = "ValueError: codebook_sizes of the model are [5, 3, 4], those of the valid SIDs [5, 3, 6]"
        require(said, SIDGRModel, model.config, trie=trie)
        require("RuntimeError: the model has no trie", SIDGRModel(model.config).generate, make_batch(0))
        require("TypeError: labels are NoneType", model, make_batch(0, with_labels=False))
        require("ValueError: the batch has 1 hierarchies, the model 3", model, other)
        said = "ValueError: codebook_sizes of the batch are [4, 3, 4], those of the model [5, 3, 4]"
        require(said, model, GPTSIDBatch.random(2, (4, 3, 4), 3, device=CPU))
        long, most = GPTSIDBatch.random(3, SIZES, 40, 1, history_dist=None, device=CPU), MAX_HISTORY + MAX_CANDIDATES
        require("max_items is 15; the model has no more positions", model, long)
        full = GPTSIDBatch.random_of_lengths(torch.tensor([most - 1, most]), torch.tensor([1, 0]), SIZES)
        said = "ValueError: row 1 has a history of 15 items, max_items is 15; the generated item needs"
        require(said, model.generate, full)
        said = "ValueError: sharding of table 'codes' is 'data_parallel' on CPU"
        require(said, build_distributed_model, model, device=CPU, sharding="data_parallel")
        said = "ValueError: the table of 'codes' is 6 wide; fbgemm's tables are a multiple of 4 wide"
        require(said, build_distributed_model, make_model(hidden_size=6), device=CPU)
