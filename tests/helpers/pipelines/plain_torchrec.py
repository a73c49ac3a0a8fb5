"""A TorchRec training script that knows nothing of evenrank's observation: rank 0 prints the loss of every step.

torchrun … tests/helpers/pipelines/plain_torchrec.py PIPELINE STEPS
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines

from examples.torchrec_dlrm import DLRM, DLRMTrain, draw_batches


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
        batches = itertools.islice(draw_batches(dist.get_rank()), steps)
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
            evaluation.progress(draw_batches(10))
            model.train()
    dist.destroy_process_group()
    # A thread of gloo frees the tensors of the last collective, for which it takes the GIL twice: torch 2.13 aborts the
    # process if the interpreter ends in between, with or without evenrank.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
