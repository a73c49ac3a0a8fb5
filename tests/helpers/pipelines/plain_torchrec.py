"""A TorchRec training script that knows nothing of evenrank's observation: rank 0 prints the loss of every step.

torchrun … tests/helpers/pipelines/plain_torchrec.py PIPELINE STEPS
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.torchrec_dlrm import DLRM, NUM_DENSE, NUM_ITEMS, DLRMTrain

ROWS = 8


def lengths_of(rank: int, step: int) -> torch.Tensor:
    """Of the rows that a rank reads for a step, int64 `(ROWS,)`."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (200 * torch.randn(ROWS, generator=generator).mul(1.4).exp()).long().clamp(1, 20_000)


def batches_of(rank: int, steps: int):
    """Random batches."""
    for step in range(steps):
        generator, lengths = torch.Generator().manual_seed(rank + 7 * step), lengths_of(rank, step)
        dense = torch.randn(ROWS, NUM_DENSE, generator=generator)
        values = torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator)
        history = KeyedJaggedTensor(keys=["history"], values=values, lengths=lengths)
        yield Batch(dense_features=dense, sparse_features=history, labels=(dense[:, 0] > 0).int())


def main() -> None:
    """Train an epoch, evaluate, and train another."""
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = DistributedModelParallel(DLRMTrain(DLRM(device)), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = getattr(train_pipelines, name)(model, optimizer, device)
    for epoch in range(2):
        batches = iter(batches_of(dist.get_rank(), steps))
        while True:
            try:
                loss = pipeline.progress(batches)
            except StopIteration:
                break
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.9f}")
        if epoch == 0:
            model.eval()
            evaluation = getattr(train_pipelines, name)(model, optimizer, device)
            evaluation.progress(iter(batches_of(10, 3)))
            model.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
