"""One run, from what a model's training script has made: its shufflers, who loads the data, the loop, and the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.trainer.args import TrainerArgs
from commons.trainer.data import deal_out
from commons.trainer.loop import TrainingLoop
from commons.trainer.train_log import TrainSummary


def run_training(
    args: TrainerArgs,
    *,
    device: torch.device,
    build_shuffler: Callable[[bool], BaseTaskBalancedBatchShuffler],
    train_loader: DataLoader[Any],
    eval_loader: DataLoader[Any] | None = None,
    **loop_arguments: Any,
) -> TrainSummary:
    """Train and, if there is something to evaluate on, evaluate; called on all ranks together.

    Args:
        args: settings.
        device: of this rank.
        build_shuffler: makes a shuffler of the user's kind that balances, or (False) one that moves nothing; training
            and evaluation have one each.
        train_loader: host batches of this rank; with `args.single_rank_load` rank 0 reads its own for all ranks.
        eval_loader: host batches of this rank; None for no evaluation.
        loop_arguments: what TrainingLoop takes besides.
    """
    balances = args.enable_balanced_shuffler
    shuffler = build_shuffler(balances or args.balance_batch)
    eval_shuffler = None if eval_loader is None else build_shuffler(balances and args.shuffle_eval)
    dealt_out = deal_out(train_loader, args, device, shuffler.get_workloads) if args.single_rank_load else None
    loop = TrainingLoop(
        args,
        device=device,
        shuffler=shuffler,
        train_loader=train_loader if dealt_out is None else dealt_out,
        eval_shuffler=eval_shuffler,
        eval_loader=eval_loader,
        **loop_arguments,
    )
    summary = loop.run()
    # Not after a failure: a worker may then wait for a rank that is gone.
    for user in (shuffler, eval_shuffler, dealt_out):
        if user is not None:
            user.close()
    return summary
