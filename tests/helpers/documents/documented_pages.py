"""As documented_names.py, for DLRM, language models and the names of other projects."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import cross_entropy
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

import evenrank
from benchmarks.shared.plain import plain_karmarkar_karp
from tests.helpers.documents.documented import documented_blocks
from tests.helpers.documents.documented_names import Run
from tests.helpers.models.hstu_models import random_batch
from tests.helpers.ranks.on_ranks import of_all


def _sparse(lengths: dict[str, list[int]]) -> KeyedJaggedTensor:
    rows = len(next(iter(lengths.values())))
    flat = torch.tensor([length for each in lengths.values() for length in each])
    return KeyedJaggedTensor(keys=list(lengths), values=torch.arange(int(flat.sum())), lengths=flat, stride=rows)


def lookups_are_balanced() -> Run:
    """A row costs its values times their width, and ranks end up with equal costs."""
    yield {}
    widths, rank = {"clicks": 64, "searches": 128}, dist.get_rank()
    try:
        shuffler = evenrank.BatchShufflerFactory.create("lookups", widths=widths)
    finally:
        evenrank.BatchShufflerFactory.unregister("lookups")
    lengths = {"shop": [5, 5], "clicks": [4, 4] if rank else [40, 40], "searches": [1, 1] if rank else [10, 10]}
    labels = torch.arange(2) + 10 * rank
    batch = Batch(dense_features=torch.rand(2, 3), sparse_features=_sparse(lengths), labels=labels)
    with contextlib.closing(shuffler):
        assert shuffler.get_workloads(batch).tolist() == ([384, 384] if rank else [3840, 3840])
        result = shuffler.shuffle(batch)
        stats = shuffler.last_stats
    assert sorted(of_all(result.labels.tolist())) == [0, 1, 10, 11]
    assert (stats.loads_before, stats.loads_after) == ((7680, 768), (4224, 4224))
    assert stats.num_tokens == 2 * (40 + 10 + 4 + 1)  # without the shops


def padding_is_stated() -> Run:
    """A rank for which there is no row trains one of padding."""
    names = yield {}
    rows = 1 - dist.get_rank()
    batch = names["DLRMBatch"](
        features=_sparse({"history": [3 * rows]}),
        batch_size=1,
        feature_to_max_seqlen={"history": 3},
        labels=torch.ones(1) * rows,
        actual_batch_size=rows,
        dense_features=torch.ones(1, 2) * rows,
    )
    with contextlib.closing(evenrank.TokensBalancedBatchShuffler()) as shuffler:
        result = shuffler.shuffle(batch)
    counts = of_all([(result.batch_size, result.actual_batch_size, float(result.dense_features.sum()))])
    assert counts == [(1, 1, 2.0), (1, 0, 0.0)]


def _made_even(shuffler: evenrank.BaseTaskBalancedBatchShuffler) -> None:
    with contextlib.closing(shuffler):
        stats = shuffler.last_stats
    assert stats.moved and stats.imbalance_after < 0.1 < 0.9 < stats.imbalance_before


def clicks_went_with_their_labels() -> Run:
    """Long histories on rank 0, short ones on rank 1; a row's label is its first value."""
    features = _sparse({"clicks": [[90, 80, 70, 60], [3, 2, 1, 4]][dist.get_rank()]})
    features = KeyedJaggedTensor(["clicks"], features.values() + 1000 * dist.get_rank(), lengths=features.lengths())
    names = yield {"features": features, "labels": features.values()[features.offsets()[:-1]]}
    # Every row of both ranks is trained once, with its own label, and the ranks are even.
    before, after = names["batch"], names["shuffled"]
    assert after.labels.tolist() == after.features.values()[after.features.offsets()[:-1]].tolist()
    assert sorted(of_all(after.labels.tolist())) == sorted(of_all(before.labels.tolist()))
    assert sorted(of_all(after.features.values().tolist())) == sorted(of_all(before.features.values().tolist()))
    assert (type(after).__name__, after.batch_size, after.actual_batch_size) == ("ClickBatch", 4, 4)
    _made_even(names["shuffler"])


def groups_went_with_their_rows() -> Run:
    """Long histories on rank 0, short ones on rank 1; everything else of a row is its number, in dicts."""
    rank, lengths = dist.get_rank(), [[90, 80, 70, 60], [3, 2, 1, 4]][dist.get_rank()]
    rows = torch.arange(4) + 4 * rank
    clicks = KeyedJaggedTensor(["clicks"], rows.repeat_interleave(torch.tensor(lengths)), lengths=torch.tensor(lengths))
    prices = clicks.values()[:, None].float().repeat(1, 2)
    names = yield {
        "dense": {"user": KeyedTensor(["age", "geo"], [1, 2], rows[:, None].float().repeat(1, 3))},
        "sparse": {"item": clicks},
        "sequences": {"price": JaggedTensor(prices, lengths=torch.tensor(lengths))},
        "labels": {"row": rows},
        "now": 1.5 + rank,
    }
    # Every row is trained once with all that belongs to it, the ranks are even, and each has its own time.
    after = names["shuffled"]
    rows = after.labels["row"]
    assert sorted(of_all(rows.tolist())) == list(range(8))
    assert torch.equal(after.dense_features["user"]["geo"], rows[:, None].float().repeat(1, 2))
    per_click = rows.repeat_interleave(after.sparse_features["item"].lengths())
    assert torch.equal(after.sparse_features["item"].values(), per_click)
    assert torch.equal(after.sequence_dense_features["price"].values(), per_click[:, None].float().repeat(1, 2))
    assert (after.batch_size, after.data_timestamp) == (-1, 1.5 + dist.get_rank())
    _made_even(names["shuffler"])


def token_rows(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Token ids padded on the right to the longest row, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(1, 5, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": ids, "attention_mask": mask.long()}


def score_rows(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number per row that does not depend on its padding, and differs between rows."""
    places = torch.arange(1, rows["input_ids"].shape[1] + 1)
    return (rows["input_ids"] * places * rows["attention_mask"]).sum(1)


def with_labels(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows with labels as a collator of Hugging Face makes them: -100 where there is padding."""
    return rows | {"labels": torch.where(rows["attention_mask"] != 0, rows["input_ids"], -100)}


def same_loss(dealt: list[dict[str, torch.Tensor]], plain: list[dict[str, torch.Tensor]]) -> None:
    """Hugging Face's loss of what the ranks were dealt, over as many labels, is that of the rows as they were."""

    def loss_and_labels(rows: dict[str, torch.Tensor]) -> tuple[float, int]:
        logits = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[rows["input_ids"]]
        labels = rows["labels"][:, 1:].flatten()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        return float(loss), int((rows["labels"] != -100).sum())

    (losses, labels), (of_plain, labels_of_plain) = (
        map(sum, zip(*of_all([loss_and_labels(rows) for rows in each]))) for each in (dealt, plain)
    )
    assert labels == labels_of_plain > 0 and abs(losses - of_plain) < 1e-9 * of_plain


def same_mean(names: dict[str, Any], mask: str) -> None:
    """Scaled sums over the micro-batches, averaged over ranks, are the mean over the masked tokens of all rows."""
    batch, micro_batches = names["batch"], names["micro_batches"]
    scaled = sum(micro_batches.loss_scale * int((rows["input_ids"] * rows[mask]).sum()) for rows in micro_batches)
    of_ranks = of_all([(scaled, int((batch["input_ids"] * batch[mask]).sum()), int(batch[mask].sum()))])
    means, sums, terms = map(sum, zip(*of_ranks))
    assert abs(means / len(of_ranks) - sums / terms) < 1e-9 * sums / terms


def padded_rows() -> dict[str, Any]:
    """A batch of padded rows, and a model that scores them."""
    return {"batch": token_rows([3, 40, 5, 7, 30, 2, 9, 12, 1, 25, 8, 6], seed=1), "model": score_rows}


def predictions_in_order() -> Run:
    """One prediction per row, in the order of the batch."""
    names = yield padded_rows()
    assert names["predictions"].tolist() == score_rows(names["batch"]).tolist()
    assert len(names["chunks"]) == 8 and names["chunks"].imbalance < 2


def results_came_home() -> Run:
    """A batch on rank 0, and rollouts that every rank has padded to its own longest."""
    rank = dist.get_rank()
    whole = {"batch": with_labels(padded_rows()["batch"])}
    task = evenrank.SelfAttentionTask(hidden_size=64, num_heads=4, head_dim=16)
    lengths = [[90, 80, 70, 60, 50], [3, 2, 4]][rank]
    names = yield {
        "task": task,
        "model": score_rows,
        "batch_or_none": whole["batch"] if rank == 0 else None,
        "workloads_or_none": task.get_workloads(whole["batch"]["attention_mask"].sum(1)) if rank == 0 else None,
        "rollouts": with_labels(token_rows(lengths, seed=2 + rank)),
    }
    # Scores are back where their rows come from, and no share is wider than its longest row.
    if names["batch_or_none"] is None:
        assert names["results"] is None
    else:
        assert names["results"].tolist() == score_rows(names["batch_or_none"]).tolist()
    assert names["rewards"].tolist() == score_rows(names["rollouts"]).tolist()
    assert names["moved"].num_moved > 0
    for batch in (names["share"].batch, names["moved"].batch):
        assert batch["input_ids"].shape[1] == int(batch["attention_mask"].sum(1).max())
    same_loss([names["share"].batch], [] if names["batch_or_none"] is None else [names["batch_or_none"]])
    same_loss([names["moved"].batch], [names["rollouts"]])


def gradients_are_those_of_rows_that_stay() -> Run:
    """Images of this rank with what they cost, and a model of two parts."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(3, 2).double(), nn.Linear(4, 1).double()
    images, texts = (torch.randn(4, width, dtype=torch.float64) * (rank + 1) for width in (3, 2))

    def decode(features: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return decoder(torch.cat([features, texts], dim=1)).sin().sum()

    names = yield {
        "images": images,
        "image_cost": [9 * rank + 1] * 4,
        "encoder": encoder,
        "decoder": decode,
        "texts": texts,
    }
    # Summed over the ranks, of the encoder; and rows have moved.
    encoder, stays = names["encoder"], nn.Linear(3, 2).double()
    stays.load_state_dict(encoder.state_dict())
    names["decoder"](stays(names["images"]), names["texts"]).backward()
    assert names["moved"].num_moved > 0
    for found, expected in zip(encoder.parameters(), stays.parameters()):
        for gradient in (found.grad, expected.grad):
            dist.all_reduce(gradient)
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


class _LanguageModel(nn.Module):
    """Logits of every place, `(rows, width, 5)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 5, dtype=torch.float64)

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tokens(rows["input_ids"])


def language_model() -> dict[str, Any]:
    """A model, and rows of which the longest fills a micro-batch and has no label."""
    torch.manual_seed(0)
    batch = token_rows([16000, 3000, 5000, 200][dist.get_rank() :], seed=dist.get_rank())
    batch = with_labels(batch)
    batch["labels"][0] = -100
    return {"model": _LanguageModel(), "batch": batch}


def whole_gradient() -> Run:
    """The averaged gradient is that of one process over the rows of all ranks, of which one had no label."""
    names = yield language_model()
    assert dist.get_rank() == 1 or 0 in names["micro_batches"].loss_tokens
    _gradient_is_of_all_rows(names)


def rows_to_pack() -> dict[str, Any]:
    """What the block before has made, and what a row costs."""
    given = language_model()
    lengths = given["batch"]["attention_mask"].sum(1)

    def loss_sum(model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = model(rows)[:, :-1], rows["labels"][:, 1:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

    return given | {
        "task": evenrank.SelfAttentionTask(hidden_size=64, num_heads=4, head_dim=16),
        "spec": evenrank.MicroBatchSpec(max_tokens_per_mb=16384, packing_algorithm="refined"),
        "lengths": lengths,
        "terms": evenrank.count_loss_tokens(given["batch"]["labels"]),
        "loss_sum": loss_sum,
        "score": score_rows,
    }


def padded_groups_hold_every_row() -> Run:
    """Every row is in one group; no group exceeds its cost, and rows dealt in turn would cost as much or more."""
    names = yield rows_to_pack()
    lengths, work = names["lengths"].tolist(), names["task"].get_workloads(names["lengths"]).tolist()
    for groups in (names["groups"], names["work"]):
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert max(len(group) * max(lengths[row] for row in group) for group in names["groups"]) <= 16384
    costliest = max(len(group) * max(work[row] for row in group) for group in names["work"])
    in_turn = [work[begin::2] for begin in range(2)]
    assert len(names["work"]) == 2 and costliest <= max(len(rows) * max(rows) for rows in in_turn)


def even_by_index() -> Run:
    """The gradient is that of all rows, scores are back where their rows are, and both ranks know how even it was."""
    names = yield rows_to_pack()
    _gradient_is_of_all_rows(names)
    same_loss(list(names["micro_batches"]), [names["batch"]])
    assert names["scores"].tolist() == score_rows(names["batch"]).tolist()
    assert max(names["micro_batches"].num_tokens) <= 16384
    assert len(names["evenness"]) == len(names["micro_batches"]) and min(names["evenness"]) >= 1


def _gradient_is_of_all_rows(names: dict[str, Any]) -> None:
    model = names["model"]
    reached = model.tokens.weight.grad.clone()
    dist.all_reduce(reached)
    reached /= dist.get_world_size()
    model.zero_grad()
    losses = []
    for rows in of_all([names["batch"]]):
        labels = rows["labels"][:, 1:].flatten()
        losses.append(cross_entropy(model(rows)[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="none"))
    terms = sum(int((rows["labels"][:, 1:] != -100).sum()) for rows in of_all([names["batch"]]))
    (torch.cat(losses).sum() / terms).backward()
    assert bool(reached.isfinite().all()) and float(model.tokens.weight.grad.abs().max()) > 1e-3
    assert float((reached - model.tokens.weight.grad).abs().max()) < 1e-12


def partitions_are_even() -> Run:
    """Answers to sixteen prompts, two each, not beside each other."""
    lengths = [int(3 + 1.25**row) for row in range(32)]
    batch = TensorDict(token_rows(lengths, seed=1), batch_size=[32])
    names = yield {"batch": batch, "uids": [f"prompt-{row % 16}" for row in range(32)], "critic": score_rows}
    # Every row is in one part, none above plain differencing's largest, and answers to one prompt share a chunk.
    workloads, plan, chunks = names["workloads"].tolist(), names["plan"], names["chunks"]
    assert sorted(row for part in names["partitions"] for row in part) == list(range(32))
    assert {len(part) for part in names["partitions"]} == {4}
    plain = plain_karmarkar_karp(workloads, 8, equal_size=True)
    assert plan.loads.max() <= max(sum(workloads[row] for row in part) for part in plain)
    assert "32 samples in 8 parts" in names["printed"] and "× the bound" in names["printed"]
    assert sorted(names["global_idx"].tolist()) == list(range(32)) and len(chunks) == 8
    prompts = [{names["uids"][row] for row in rows.tolist()} for rows in chunks.indices]
    assert sum(map(len, prompts)) == 16
    assert names["values"].tolist() == score_rows(names["batch"]).tolist()


def mini_batches_are_even() -> Run:
    """Each rank's part of the reordered batch, cut into four, has the planned loads."""
    names = yield {"torch": torch, "workloads": torch.arange(256) ** 2}
    parts = names["workloads"][names["global_idx"]].view(8, 4, 8).sum(2)
    assert sorted(names["global_idx"].tolist()) == list(range(256)) and parts.T.tolist() == names["grid"].loads.tolist()
    assert parts.max(0).values.sum() < 1.01 * parts.sum() / 8


def the_budget_is_kept() -> Run:
    """Those of the text, and the task of the block before."""
    lengths = [10000, 7000, 4000, 4000, 3000, 2000]
    task = evenrank.SelfAttentionTask(hidden_size=4096, num_heads=32, head_dim=128, num_layers=32, vocab_size=32000)
    batch = token_rows(lengths, seed=1)
    batch["response_mask"] = batch["attention_mask"] * (batch["input_ids"] > 2)
    names = yield {"batch": batch, "lengths": lengths, "task": task, "actor": score_rows}
    same_mean(names, "response_mask")
    # Differencing of the workloads breaks it, as the text says; the block prints what its comment says.
    lengths = names["lengths"]
    two = evenrank.karmarkar_karp([24576 * each + each**2 for each in lengths], 2, equal_size=False)
    assert [sum(lengths[row] for row in part) for part in two] == [16000, 14000]
    shown = documented_blocks()["docs/from_verl.md", "Micro-batches under a token budget", 0].text
    assert names["printed"].strip() == "[15000, 15000]" and "# [15000, 15000]" in shown
    assert names["log_probs"].tolist() == score_rows(names["batch"]).tolist()


def groups_are_as_printed() -> Run:
    """What the block prints is the block below it."""
    names = yield {}
    shown = documented_blocks()["docs/from_areal.md", "Allocators", 1].text
    assert names["printed"].strip() == shown.strip()


def pairs_stayed_together() -> Run:
    """Pairs of neighbours, and a model that takes rows put end to end."""

    def model(packed: Any) -> torch.Tensor:
        ends = packed.cu_seqlens.tolist()
        ids, places = packed.inputs["input_ids"][0], packed.inputs["position_ids"][0] + 1
        return torch.stack([(ids * places)[start:end].sum() for start, end in itertools.pairwise(ends)])

    batch = token_rows([4000, 3500, 10, 20, 5000, 100, 700, 800], seed=1)
    batch["loss_mask"] = batch["attention_mask"] * (batch["input_ids"] > 2)
    names = yield {"batch": batch, "model": model}
    same_mean(names, "loss_mask")
    # Scores are in the order of the batch, and neighbours share a micro-batch within the budget.
    assert names["logprobs"].tolist() == score_rows(names["batch"]).tolist()
    assert all({row ^ 1 for row in group} == set(group) for group in names["micro_batches"].groups)
    assert max(names["micro_batches"].num_tokens) <= 9000 and len(names["micro_batches"]) == 2


def rewards_came_home() -> Run:
    """Long ones on rank 0, short ones on rank 1."""
    rank = dist.get_rank()
    lengths = [[90, 80, 70, 60, 50, 50], [3, 2]][rank]
    prompts = [f"prompt {rank} {row // 2}" for row in range(len(lengths))]
    names = yield {"rollouts": with_labels(token_rows(lengths, seed=1)), "prompts": prompts, "reward_model": score_rows}
    # In the order of the rank's own rows, after some have moved; and what was dealt out trains as they do.
    assert names["rewards"].tolist() == score_rows(names["rollouts"]).tolist()
    same_loss([names["moved"].batch], [names["rollouts"]])
    assert names["moved"].num_moved > 0 and "largest load" in names["printed"]
    # The two answers to a prompt are neighbours.
    assert all(first % 2 == 0 and second == first + 1 for first, second in names["moved"].indices.view(-1, 2).tolist())


def rows_with_their_workloads() -> Run:
    """Users with long histories on rank 0, with short ones on rank 1."""
    rank = dist.get_rank()
    names = yield {"batch": random_batch(4, longest=[200, 10][rank], most=200, seed=rank)}
    # Every row of the global batch once, with the cost of the rows that are there; loads are nearly even.
    assert sorted(of_all(names["indices"].tolist())) == list(range(8))
    assert names["shuffler"].get_workloads(names["batch"]).tolist() == names["workloads"].tolist()
    before, after = map(float, re.findall(r"([\d.]+)%", names["printed"]))
    assert before > 50 > 20 > after
