"""Padded sequences that are dealt out: shares are as wide as their own longest row, results come back as wide as the
sequences were, and Hugging Face's loss is that of the plain rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from commons.dispatch import SingleRankLoader, Trim, redistribute_balanced, scatter_balanced
from commons.micro_batching import MicroBatchSpec, count_loss_tokens, pack_micro_batches
from tests.helpers.ranks.on_ranks import on_ranks

# The second rank has one long row, and so no padding; the third one has no rows; the last has columns to spare.
LENGTHS = [[5, 9, 2, 7], [12], [], [3, 3, 4]]
PAD_TOKEN = 6


def padded_texts(lengths, left, seed):
    """As a collator makes them: token 6 and label -100 where there is padding, and on the first token, the prompt."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths, default=0) + 2 * (seed == 3)
    counts = torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    place = torch.arange(width) - (width - counts if left else 0)
    mask = (place >= 0) & (place < counts)
    ids = torch.randint(0, 6, mask.shape, generator=generator)
    return {
        "input_ids": torch.where(mask, ids, PAD_TOKEN),
        "attention_mask": mask.long(),
        "labels": torch.where(mask & (place > 0), ids, -100),
        "advantages": torch.where(mask, torch.rand(mask.shape, generator=generator), 0.0),
    }


def loss_and_labels(batch):
    """The sum of Hugging Face's causal loss, how many labels it is over, and the sum of another field."""
    logits = torch.rand(PAD_TOKEN + 1, PAD_TOKEN + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    predicted, labels = logits[batch["input_ids"]][:, :-1], batch["labels"][:, 1:]
    loss = cross_entropy(predicted.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return torch.stack([loss, (batch["labels"] != -100).sum(), batch["advantages"].double().sum()])


def sums(batches):
    return sum((loss_and_labels(batch) for batch in batches), torch.zeros(3, dtype=torch.float64))


def came_back(results, plain, left):
    """Whether results per token are the ids of plain rows, with padding on the one side."""
    width = plain["input_ids"].shape[1]
    kept, added = results.flip(1 if left else 0).split([width, results.shape[1] - width], dim=1)
    return torch.equal(kept, plain["input_ids"].flip(1 if left else 0)) and bool((added == PAD_TOKEN).all())


def dealt(call, left):
    """What the ranks train on, by one of the calls that deal rows out, and the rows there were."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trim = Trim("attention_mask", side="left" if left else "right")
    batches = [padded_texts(lengths, left, seed) for seed, lengths in enumerate(LENGTHS[:world_size])]
    # A rank without rows has no batch, or a batch without rows.
    own, lengths = (batches[rank], LENGTHS[rank]) if LENGTHS[rank] or left else (None, None)
    if call == "redistribute_balanced":
        moved = redistribute_balanced(own, lengths, trim=trim)
        home = moved.send_home(moved.untrim(moved.batch["input_ids"], fill=PAD_TOKEN))
        assert moved.num_moved and (home is None) == (not LENGTHS[rank])
        assert home is None or came_back(home, own, left)
        return [moved.batch], batches
    if call == "pack_micro_batches":
        spec = MicroBatchSpec(n_mbs=2, packing_algorithm="refined")
        terms = None if own is None else count_loss_tokens(own["labels"])
        packed = pack_micro_batches(own, spec, lengths, loss_tokens=terms, joint=True, trim=trim)
        return list(packed), batches
    if call == "SingleRankLoader":
        loader = SingleRankLoader(batches[:1] if rank == 0 else None, trim=trim)
        given = list(loader)
        loader.close()
        return given, batches[:1]
    whole = padded_texts(LENGTHS[0] + [1], left, 5)  # five rows, which two or four ranks get an uneven share of
    arguments = (whole, LENGTHS[0] + [1]) if rank == 0 else (None, None)
    share = scatter_balanced(*arguments, trim=trim, pad=True)
    assert bool((share.batch["input_ids"][share.is_padding] == PAD_TOKEN).all())
    again = share.scatter_more(arguments[0], trim=trim)
    assert torch.equal(again["labels"], share.batch["labels"])
    back = share.gather_back(share.untrim(share.batch["input_ids"], "attention_mask", fill=PAD_TOKEN))
    assert back is None or came_back(back, whole, left)
    return [share.batch], [whole]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "call", ["redistribute_balanced", "pack_micro_batches", "scatter_balanced", "SingleRankLoader"]
)
@on_ranks
def test_the_loss_is_that_of_the_plain_rows(call, left):
    batches, plain = dealt(call, left)
    for batch in batches if call != "pack_micro_batches" else ():  # whose micro-batches have the width of their rank
        assert batch["input_ids"].shape[1] == max(1, *batch["attention_mask"].sum(1).tolist())
    reached = sums(batches)
    dist.all_reduce(reached)
    assert reached.tolist() == pytest.approx(sums(plain).tolist(), rel=1e-12, abs=0)
