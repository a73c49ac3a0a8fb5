"""The content of a checkpoint, as one flat dictionary for torch.distributed.checkpoint.

Sharded tables and the state of their optimizers are ShardedTensors, which can be loaded on another number of ranks or
with another sharding. Dense values are equal on all ranks and saved once. Random states are saved per rank.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from commons.trainer.checkpoint.random_state import random_state
from commons.trainer.ranks.collectives import all_reduce

_MODEL, _TABLES, _DENSE, _RANDOM = "model/", "tables_optimizer/", "dense_optimizer/", "random/"
_TABLES_STEP = "tables_optimizer_step"
_REMEDY = "a checkpoint fits only the model that wrote it, as in that release: use both, or another checkpoint"


def state_to_save(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries of this rank: model, optimizers, random states."""
    state = _in_place(model.state_dict(), _tables_optimizer_state(model))
    if tables := _fused_tables(getattr(model, "fused_optimizer", None)):
        state[_TABLES_STEP] = torch.stack([each.iter for each in tables]).max()  # all are looked up equally often
    for name, parameter in _dense_names(model, optimizer).items():
        slots = optimizer.state.get(parameter, {})
        state |= {f"{_DENSE}{name}/{slot}": torch.as_tensor(value) for slot, value in slots.items()}
    return state | _own_random_state()


@contextlib.contextmanager
def kept_table_steps(model: nn.Module) -> Iterator[None]:
    """A context that restores the step counts of the tables' optimizers: fbgemm counts every lookup as a step."""
    tables = _fused_tables(getattr(model, "fused_optimizer", None))
    counts = [(each, name) for each in tables for name in ("iter", "iter_cpu") if hasattr(each, name)]
    before = [getattr(each, name).clone() for each, name in counts]
    try:
        yield
    finally:
        for (each, name), count in zip(counts, before):
            getattr(each, name).copy_(count)


def first_not_finite(state: dict[str, Any], model: nn.Module) -> str:
    """Name of the first weight or optimizer slot with a NaN or an infinity on this rank; "" if all are finite.

    `state` comes from `state_to_save`. The model's buffers are not checked: a mask may contain infinities.
    """
    buffers = {_MODEL + name for name, _ in model.named_buffers()}
    for name, value in state.items():
        if name.startswith(_RANDOM) or name in buffers:
            continue
        for part in [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]:
            if part.is_floating_point() and part.numel():
                # Both are NaN if any element is; unlike isfinite, aminmax allocates no tensor of the same size.
                least, most = torch.aminmax(part.detach())
                if not (math.isfinite(least) and math.isfinite(most)):
                    return name.partition("/")[2]
    return ""


def read_entries(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint's entries by name (shapes, dtypes, storage); unpickles them.

    Raises:
        ValueError: the metadata cannot be read.
    """
    try:
        return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # unpickling may raise anything
        raise ValueError(f"{path} cannot be read (.metadata: {error}): load another checkpoint") from None


def misfit_of(path: Path, saved: dict[str, Any], model: nn.Module) -> str:
    """Why a checkpoint, of which `saved` is the result of `read_entries`, does not fit the model; "" if it fits."""
    state = _in_place(model.state_dict(), _tables_optimizer_state(model))
    missing = sorted(name for name in state if name not in saved)
    found = f"lacks {missing[0]} (and {len(missing) - 1} more)" if missing else ""
    for name in () if missing else state:
        size = getattr(saved[name], "size", None)  # None: no tensor
        if size is not None and size != state[name].size():
            found = found or f"has {name} of shape {tuple(size)}, this model has {tuple(state[name].size())}"
    return f"{path} {found}; {_REMEDY}" if found else ""


def unread_of(
    path: Path, saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> str:
    """As `misfit_of`, but of entries that no rank has, such as those of more layers; a collective call.

    A table's optimizer has other entries with another kind of optimizer, a data_parallel table those of `optimizer`.
    """
    names = [name for name in saved if name.startswith((_MODEL, _TABLES, _DENSE))]
    own, dense = _in_place(model.state_dict(), _tables_optimizer_state(model)), _dense_names(model, optimizer)
    found_here = [name in own or name.removeprefix(_DENSE).rsplit("/", 1)[0] in dense for name in names]
    num_ranks = torch.tensor(found_here, dtype=torch.int64, device=device)
    all_reduce(num_ranks, "comparison of a checkpoint's entries")  # with tensor parallelism, ranks have other entries
    unread = sorted(name for name, having in zip(names, num_ranks.tolist()) if not having)
    found = f"has {unread[0]} (and {len(unread) - 1} more), which this model lacks" if unread else ""
    return f"{path} {found}; {_REMEDY}" if found else ""


def load_state(
    path: Path, saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Load the entries of `state_to_save` in place; called on all ranks together.

    `saved` is the result of `read_entries` and fits the model (`misfit_of`). If reading fails midway, the model has
    only a part of the values.

    Returns:
        The random states that the same rank saved, by generator; empty if the saved run had fewer ranks.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    model_state, tables = model.state_dict(), _tables_optimizer_state(model)
    state = _in_place(model_state, tables)
    names = _dense_names(model, optimizer)
    # A tensor-parallel rank loads only its own layers; the checkpoint also has the layers of its peers.
    dense = {
        name: found
        for name, found in saved.items()
        if name.startswith(_DENSE) and name.removeprefix(_DENSE).rsplit("/", 1)[0] in names
    }
    own_random = _own_random_state()
    random = {name: found for name, found in saved.items() if name in own_random}
    step = {name: found for name, found in saved.items() if name == _TABLES_STEP}
    for name, found in (dense | random | step).items():
        state[name] = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:  # a failure of any rank is raised on every rank
        raise ValueError(f"{path} cannot be read ({_describe_failure(error)}): load another checkpoint") from None
    model.load_state_dict(model_state)
    if tables:
        fused: Any = model.fused_optimizer
        fused.load_state_dict({"state": tables})
        if step:
            fused.set_optimizer_step(int(state[_TABLES_STEP]))
    # As torch's optimizers: a step count is on the host, unless the kernels of its group count on the device.
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    on_device = {id(parameter) for group in groups for parameter in group["params"]}
    for key in dense:
        name, slot = key.removeprefix(_DENSE).rsplit("/", 1)
        on_host = slot == "step" and id(names[name]) not in on_device
        value = state[key] if on_host else state[key].to(names[name].device)
        optimizer.state[names[name]][slot] = value
    return {name.rsplit("/", 1)[1]: state[name] for name in random}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the entries of `state_to_save` to a folder; called on all ranks together.

    Raises:
        OSError: a rank could not write its part.
    """
    try:
        dcp.save(state, checkpoint_id=path)
    except CheckpointException as error:  # a failure of any rank is raised on every rank
        raise OSError(_describe_failure(error)) from None


def _describe_failure(error: CheckpointException) -> str:
    """The first rank that failed and why, in one line."""
    rank, failure = next(iter(error.failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {textwrap.shorten(str(cause), 160, placeholder=' …') or type(cause).__name__}"


def _in_place(model_state: dict[str, Any], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Entries that are loaded in place: the model, and the state of its tables' optimizers."""
    slots = {f"{_TABLES}{table}/{slot}": value for table, slots in tables.items() for slot, value in slots.items()}
    return {_MODEL + name: value for name, value in model_state.items()} | slots


def _tables_optimizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """State of the optimizers that update tables in the backward pass, by table and slot."""
    fused: Any = getattr(model, "fused_optimizer", None)
    return {} if fused is None else fused.state_dict()["state"]


def _fused_tables(optimizer: Any) -> list[Any]:
    """The modules of fbgemm with the tables that are updated in the backward pass.

    They count the steps, int64 `(1,)`: `iter` for checkpoints and, on the host, `iter_cpu` for the next update. Adam
    corrects its running means by the count. TorchRec can set it, but its state of these optimizers lacks it.
    """
    own = [optimizer._emb_module] if hasattr(optimizer, "_emb_module") else []
    return own + [tables for _, part in getattr(optimizer, "optimizers", ()) for tables in _fused_tables(part)]


def _dense_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their names in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _own_random_state() -> dict[str, torch.Tensor]:
    """The random states of this rank, by names that contain the rank."""
    return {f"{_RANDOM}{dist.get_rank()}/{name}": state for name, state in random_state().items()}
