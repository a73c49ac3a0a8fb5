"""A TorchRec training script that keeps its ranks evenly loaded: TorchRec's Batch, model parallelism and pipeline.

The model is a DLRM whose users have histories of items. Every item of a history goes through an MLP, so the cost of a
user is proportional to the length of the history, and lengths are heavy-tailed. Each step prints the imbalance, the
largest load of a rank ÷ the mean load − 1, before and after balancing.

Examples:
    torchrun --standalone --nproc_per_node=2 examples/torchrec_dlrm.py

Uses one GPU per rank if the machine has enough GPUs, else the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenrank import ShufflerOptions, TokensBalancedBatchShuffler, balanced, global_mean_loss, mean_over_ranks

NUM_ITEMS, NUM_DENSE, WIDTH = 10_000, 13, 64
ROWS, STEPS = 32, 10  # per rank


class HistoryArch(nn.Module):
    """Scores every item of a history, and sums the items weighted by their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))

    def forward(self, history: JaggedTensor) -> torch.Tensor:
        """From the embedded items of all rows to `(rows, WIDTH)`."""
        items = history.values()  # (items, WIDTH)
        return torch.segment_reduce(items * self.score(items), "sum", lengths=history.lengths().long(), initial=0)


class DLRM(nn.Module):
    """An MLP over the dense features and the history of a user."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item_table", embedding_dim=WIDTH, num_embeddings=NUM_ITEMS, feature_names=["history"]
        )
        self.embeddings = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.history_arch = HistoryArch().to(device)
        self.dense_arch = nn.Linear(NUM_DENSE, WIDTH, device=device)
        self.over_arch = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits `(rows, 1)`."""
        pooled = self.history_arch(self.embeddings(sparse_features)["history"])
        return self.over_arch(torch.cat([self.dense_arch(dense_features), pooled], dim=1))


class DLRMTrain(nn.Module):
    """The model with its loss, like TorchRec's class of this name."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss to train, and the detached loss for the log."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss_sum = functional.binary_cross_entropy_with_logits(logits, batch.labels.float(), reduction="sum")
        loss = global_mean_loss(loss_sum, batch.labels.numel())  # instead of a mean per rank
        return loss, loss.detach()


def draw_batches(rank: int) -> Iterator[Batch]:
    """Random batches of a rank: most histories are short, some are long."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS - rank % 2):
        lengths = (20 * torch.randn(ROWS, generator=generator).mul(1.2).exp()).long().clamp(1, 2000)
        dense_features = torch.randn(ROWS, NUM_DENSE, generator=generator)
        yield Batch(
            dense_features=dense_features,
            sparse_features=KeyedJaggedTensor(
                keys=["history"],
                values=torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator),
                lengths=lengths,
            ),
            labels=(dense_features[:, 0] > 0).int(),
        )


def pick_device() -> torch.device:
    """This rank's GPU, or the CPU if there are fewer GPUs than ranks on this machine."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main() -> None:
    """Train, and print the imbalance of every step."""
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(device))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.model.embeddings.parameters(), {"lr": 0.01})
    model = DistributedModelParallel(model, device=device)
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.Adagrad(dense, lr=0.01)
    dataloader = draw_batches(dist.get_rank())

    shuffler = TokensBalancedBatchShuffler(options=ShufflerOptions(slack=0.01))  # or your model's own
    pipeline = balanced(TrainPipelineSparseDist)(  # TorchRec's class, with one hook
        model, optimizer, device, batch_shuffler=shuffler
    )
    batches = iter(dataloader)
    while True:
        try:
            loss = pipeline.progress(batches)  # ranks may run out of data at different steps
        except StopIteration:
            break
        stats, loss = pipeline.last_stats, mean_over_ranks(loss)  # the loss of the global batch, on all ranks
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f}, imbalance {stats.imbalance_before:.1%} → {stats.imbalance_after:.1%}")

    shuffler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
