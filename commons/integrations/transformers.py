"""Hugging Face's Trainer and TRL's SFTTrainer: rows assigned to ranks and micro-batches by workload.

trainer = balanced(Trainer(model=model, args=args, train_dataset=rows, data_collator=collator))
trainer.train()
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import partial
from typing import Any, TypeVar

import numpy as np
import transformers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from commons.checks import as_count, kind_of
from commons.console import progress_bar
from commons.datasets import BalancedBatchSampler
from commons.datasets.samplers.epoch import EPOCH_START
from commons.integrations.model_cost import Cost, model_cost
from commons.integrations.one_plan import require_one_plan
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner import as_int64_workloads

T = TypeVar("T", bound=Trainer)
_HOOKS = ("get_train_dataloader", "model_accepts_loss_kwargs", "compute_loss_func")
_LOSSES = ("loss", "cross_entropy", "criterion")  # parts of the names of what computes a loss


def balanced(
    trainer: T, *, lengths: Any = None, cost: Cost | None = None, padded: bool | None = None, window: int = 1
) -> T:
    """Make a Trainer read its rows so that all ranks have equal work in every micro-batch.

    An optimizer step trains the rows of all ranks and accumulated micro-batches; evenrank plans which rank and which
    micro-batch trains each of these rows. The Trainer still chooses seed and epochs, and resumes within an epoch.

    Args:
        trainer: a transformers.Trainer or a subclass, such as TRL's SFTTrainer.
        lengths: tokens of each row of `train_dataset`, `(n,)`; None for its column `args.length_column_name`, or
            without that column for the tokens counted in each row.
        cost: function from lengths int64 `(m,)` to workloads `(m,)`; None for the FLOPs of the model's layers
            (`model_cost`).
        padded: whether the collator pads rows to the longest row of their micro-batch; None to infer it from the
            collator's type.
        window: optimizer steps that share their rows; with 1 every step keeps its rows.

    Returns:
        The same trainer.

    Raises:
        TypeError, ValueError: when training begins, before its first step: a data set without a length, lengths that
            are missing or differ from the rows, a `cost` that does not return a workload per row, a model whose cost
            is unknown, a loss that is not divided by the number of items on all ranks, ranks with different lengths or
            seeds, a checkpoint whose run trained other rows than this one skips.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer is {kind_of(trainer)}; it must be a transformers.Trainer: make one first")
    missing = [name for name in _HOOKS if not hasattr(trainer, name)]
    if missing:
        raise TypeError(
            f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which balancing needs: "
            "install a newer one, as pip install 'evenrank[transformers]' does"
        )
    if not (cost is None or callable(cost)):
        raise TypeError(f"cost is {kind_of(cost)}; it must be a function from lengths to workloads: pass one")
    window = as_count(window, "window", 1)
    trainer.get_train_dataloader = partial(_loader, trainer, lengths, cost, padded, window)
    trainer.remove_callback(_TrainedRows)
    trainer.callback_handler.callbacks.insert(0, _TrainedRows())  # before those that save, as for SIGTERM
    return trainer


class _TrainedRows(TrainerCallback):
    """Compares the plans of ranks, and the rows that a checkpoint's run trained with those that a resumed run skips.

    The Trainer skips as many steps as were trained; in a plan for other ranks or settings, these have other rows.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise ValueError if rows would be lost or trained twice."""
        require_one_plan("balanced", lambda: kwargs["train_dataloader"].batch_sampler)
        if args.ignore_data_skip or not state.global_step:
            return
        skipped = _trained(kwargs["train_dataloader"].batch_sampler, args, state)
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("trained", {})
        if skipped == (saved or {"epoch": skipped["epoch"], **EPOCH_START._asdict()}):
            return
        names = [name for name in skipped if name in saved and saved[name] != skipped[name]]
        before, now = (", ".join(f"{name} {each[name]}" for name in names) for each in (saved, skipped))
        differ = f"the checkpoint has {before}, this run {now}" if saved else "the checkpoint's run was not balanced"
        raise ValueError(
            f"after {state.global_step} steps {differ}; rows would be lost or trained twice: resume with the same "
            "ranks and settings, or with as many rows per step from a checkpoint at the end of a window, or set "
            "ignore_data_skip=True, which begins the epoch again"
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note which rows were trained, in what a checkpoint saves."""
        trained = _trained(kwargs["train_dataloader"].batch_sampler, args, state)
        state.stateful_callbacks[type(self).__name__] = {"args": {}, "attributes": {"trained": trained}}


def _trained(sampler: BalancedBatchSampler, args: Any, state: Any) -> dict[str, Any]:
    """The place after a number of optimizer steps, and the settings that decide which rows are before it."""
    accumulated = args.gradient_accumulation_steps
    epoch, steps = divmod(state.global_step, max(1, -(-len(sampler) // accumulated)))
    place, plan = sampler.place_after(steps * accumulated, epoch, EPOCH_START), sampler.identity()
    of_order = ("num_rows", "shuffle", "seed") if place.row else ()
    names = [name for name in plan if name != "rank"] if place.steps else of_order
    return {"epoch": epoch, **place._asdict(), **{name: plan[name] for name in names}}


class _EpochLoader(DataLoader):
    """A loader whose epoch the Trainer sets; not prepared by Accelerate, which would split its batches over ranks."""

    batch_sampler: BalancedBatchSampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        self.batch_sampler.set_epoch(epoch)


def _loader(trainer: Trainer, lengths: Any, cost: Cost | None, padded: bool | None, window: int) -> DataLoader:
    args, dataset = trainer.args, trainer.train_dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"train_dataset is {kind_of(dataset)} without a length; balancing needs the lengths of all rows "
            "before training: use a map-style data set"
        )
    config = getattr(trainer.accelerator, "parallelism_config", None)  # has cp_size before the Trainer has get_cp_size
    sizes = {
        kind: max(getattr(trainer, f"get_{kind}_size", lambda: 1)(), getattr(config, f"{kind}_size", None) or 1)
        for kind in ("tp", "cp", "sp")
    }
    if max(sizes.values()) > 1:
        raise ValueError(
            f"tensor, context and sequence parallel sizes are {list(sizes.values())}; balanced() gives every process "
            "its own rows, but those that share a sample need the same rows: use data parallelism alone"
        )
    stock = type(trainer).get_train_dataloader(trainer)  # for its collator, columns and workers
    shuffles = _is_shuffled(trainer, stock)
    collator = trainer.data_collator
    kinds = [kind.__name__ for kind in type(collator).__mro__]
    is_flat = getattr(collator, "padding_free", False) or "DataCollatorWithFlattening" in kinds
    pads = not is_flat if padded is None else padded
    if pads:
        _require_counted_loss(trainer)
    tokens = as_int64_workloads(_lengths(trainer) if lengths is None else lengths, "lengths", len(dataset))
    cost = partial(_costs, cost or model_cost(trainer.accelerator.unwrap_model(trainer.model)))
    batch_size = trainer._train_batch_size  # not that of args: auto_find_batch_size lowers it
    sampler = BalancedBatchSampler(
        cost(tokens) if pads else _costs_of_packed(dataset, tokens, cost),
        batch_size // args.world_size if trainer.accelerator.split_batches else batch_size,
        num_ranks=args.world_size,
        rank=args.process_index,
        window=window * args.gradient_accumulation_steps,
        shuffle=shuffles,
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
        padded=pads,
    )
    _require_lengths(trainer, tokens, next(sampler.items(0, EPOCH_START), []))
    kept = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(stock, name) for name in (*kept, "multiprocessing_context")}
    return _EpochLoader(stock.dataset, batch_sampler=sampler, **options)


def _is_shuffled(trainer: Trainer, stock: DataLoader) -> bool:
    """Whether the Trainer's own loader reads rows in random order; ValueError if it chooses them in another way."""
    batches = getattr(stock.batch_sampler, "batch_sampler", stock.batch_sampler)  # Accelerate may wrap it
    order = getattr(batches, "sampler", None)
    of_all = isinstance(order, RandomSampler) and not order.replacement and len(order) == len(order.data_source)
    if of_all or isinstance(order, LengthGroupedSampler) or type(batches).__name__ == "BatchRebalanceSampler":
        return True
    if isinstance(order, SequentialSampler):  # train_sampling_strategy="sequential"
        return False
    own = type(batches if order is None else order).__name__
    raise ValueError(
        f"{type(trainer).__name__} chooses its rows by a {own}, which balancing would replace by a random order of all "
        "rows: use this trainer without balanced(), or a Trainer with its own sampler"
    )


def _require_counted_loss(trainer: Trainer) -> None:
    """Raise ValueError if the loss would weigh micro-batches of different numbers of rows equally."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    own_loss, method = trainer.compute_loss_func, _method_of(trainer, "compute_loss")
    unused = [each.__name__ for each in (own_loss, method) if each is not None and _uses_of_count(each) == (0, 0)]
    what, where = "the model takes no num_items_in_batch", "compute_loss_func"
    smoother = trainer.label_smoother
    if counts and trainer.compute_loss_func is None and smoother is not None:
        if "num_items_in_batch" not in inspect.signature(type(smoother).__call__).parameters:
            counts, what = False, "the loss of label_smoothing_factor is a mean over a micro-batch"
    elif counts and own_loss is None and method is Trainer.compute_loss:
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # as the Trainer, with PEFT
        if trainer.label_names and "labels" not in trainer.label_names:
            counts, what = False, f"the labels are {', '.join(trainer.label_names)}, and the Trainer counts only labels"
        elif _has_mean_loss(_method_of(model, "forward")):
            counts, what = False, f"the loss of {type(model).__name__} is a mean over a micro-batch"
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is False:  # as in TRL's DPOTrainer and RewardTrainer
        counts, what = False, "its loss is a mean over a micro-batch (loss_is_scaled_for_ga is False)"
        where = "a compute_loss of its own, with loss_is_scaled_for_ga = True"
    elif counts and scaled is None and unused:
        counts, what = False, f"{unused[0]} of {type(trainer).__name__} does not use num_items_in_batch"
        where = f"{unused[0]}; if it divides by a number of all ranks already, set loss_is_scaled_for_ga = True"
    if counts and trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        counts, what, where = False, "average_tokens_across_devices is False", "average_tokens_across_devices=True"
    if not counts:
        raise ValueError(
            f"{what}; micro-batches of {type(trainer).__name__} have different numbers of rows, so their mean losses "
            f"must not weigh the same: divide by num_items_in_batch of all ranks ({where}), or pass padded=False and "
            "set dataloader_drop_last=True"
        )


def _method_of(instance: Any, name: str) -> Any:
    """The first `compute_loss` or `forward` that does more with num_items_in_batch than hand it to `super()`."""
    methods = [vars(owner)[name] for owner in type(instance).__mro__ if name in vars(owner)]
    for method in methods:
        total, handed_on = _uses_of_count(method) or (1, 0)
        if total > handed_on or not total:
            break
    return method


def _uses_of_count(method: Any) -> tuple[int, int] | None:
    """How often a method reads num_items_in_batch or **kwargs, and how often of these to call that of `super()`."""
    source = _parsed(method)
    if source is None:
        return None
    names = ("num_items_in_batch", _name_of_others(source))

    def count(node: ast.AST) -> int:
        return sum(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))

    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    ends = (").compute_loss", ").forward")
    return count(source), sum(count(call) for call in calls if ast.unparse(call.func).endswith(ends))


def _has_mean_loss(forward: Any) -> bool:
    """Whether a model takes num_items_in_batch without using it, as most models with another head than a causal one."""
    source = _parsed(forward)
    if source is None:
        return False
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func).lower().rpartition(".")[2] for call in calls]
    losses = [call for call, name in zip(calls, names) if any(part in name for part in _LOSSES)]
    others = _name_of_others(source)
    passed_on = others is not None and any(
        isinstance(node, ast.Name) and node.id == others for call in losses or calls for node in ast.walk(call)
    )
    return not passed_on and "num_items_in_batch" not in ast.unparse(source)


def _parsed(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None  # no source, nothing known


def _name_of_others(source: ast.AST) -> str | None:
    """The name of a function's **kwargs."""
    others = next((node.args.kwarg for node in ast.walk(source) if isinstance(node, ast.FunctionDef)), None)
    return None if others is None else others.arg


def _input_name(trainer: Trainer) -> str:
    return (getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"])[0]


def _lengths(trainer: Trainer) -> list[int]:
    dataset, name, column = trainer.train_dataset, _input_name(trainer), trainer.args.length_column_name
    columns = getattr(dataset, "column_names", ())
    if column in columns:
        return list(dataset[column])
    if not _has_field(dataset[0], name):
        raise ValueError(
            f"rows of train_dataset have no field {name!r} to count tokens in; balancing needs the lengths of rows: "
            "pass lengths="
        )
    rows = dataset[name] if name in columns else (dataset[row][name] for row in range(len(dataset)))
    lengths = []
    with progress_bar("counting tokens", len(dataset), " rows", show=trainer.args.process_index == 0) as bar:
        for row in rows:
            lengths.append(len(row))
            bar.update()
    return lengths


def _costs(cost: Cost, lengths: np.ndarray) -> np.ndarray:
    """The workloads of rows of these lengths, int64; ValueError unless `cost` returns one for each."""
    return as_int64_workloads(cost(lengths), "cost(lengths)", len(lengths))


def _costs_of_packed(dataset: Any, tokens: np.ndarray, cost: Cost) -> Any:
    """The cost of each row; that of a row packed from sequences, in TRL's column "seq_lengths", is their sum."""
    if "seq_lengths" not in getattr(dataset, "column_names", ()):
        return cost(tokens)
    packed = list(dataset["seq_lengths"])
    row = np.repeat(np.arange(len(packed)), list(map(len, packed)))
    return sum_by_rank(row, np.asarray(cost(np.concatenate(packed).astype(np.int64))), len(packed))


def _require_lengths(trainer: Trainer, lengths: np.ndarray, rows: list[int]) -> None:
    """Raise ValueError if a row of the first batch has another length than given."""
    for row in rows:
        item, name = trainer.train_dataset[row], _input_name(trainer)
        if _has_field(item, name) and len(item[name]) != lengths[row]:
            raise ValueError(
                f"row {row} has {len(item[name])} tokens, its length is given as {lengths[row]}; wrong lengths make an "
                "uneven plan: correct the lengths"
            )


def _has_field(row: Any, name: str) -> bool:
    try:
        return name in row
    except TypeError:
        return False
