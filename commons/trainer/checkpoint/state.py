"""What a checkpoint holds, as one flat dictionary for torch.distributed.checkpoint.

Sharded tables and the state of their optimizers are ShardedTensors, which can be loaded on another number of ranks or
under another sharding. Everything dense is the same on all ranks and saved once. Random states belong to ranks.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from commons.trainer.checkpoint.random_state import random_state

_MODEL, _TABLES, _DENSE, _RANDOM = "model/", "tables_optimizer/", "dense_optimizer/", "random/"


def state_to_save(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything of this rank."""
    state = _in_place(model.state_dict(), _tables_optimizer_state(model))
    for name, parameter in _dense_names(model, optimizer).items():
        slots = optimizer.state.get(parameter, {})
        state |= {f"{_DENSE}{name}/{slot}": torch.as_tensor(value) for slot, value in slots.items()}
    return state | _own_random_state()


def first_not_finite(state: dict[str, Any], model: nn.Module) -> str:
    """Name of a weight, or of an optimizer's slot, that holds a NaN or an infinity on this rank; "" if none does.

    `state` is that of `state_to_save`. Buffers of the model are not looked at: a mask may be made of infinities.
    """
    buffers = {_MODEL + name for name, _ in model.named_buffers()}
    for name, value in state.items():
        if name.startswith(_RANDOM) or name in buffers:
            continue
        for part in [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]:
            if part.is_floating_point() and part.numel():
                # Both are NaN if one element is; unlike isfinite they need no memory.
                least, most = torch.aminmax(part.detach())
                if not (math.isfinite(least) and math.isfinite(most)):
                    return name.partition("/")[2]
    return ""


def read_entries(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name: shapes, dtypes and where they lie; unpickles its metadata.

    Raises:
        ValueError: the metadata cannot be read.
    """
    try:
        return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # whatever unpickling ends with
        raise ValueError(f"{path} cannot be read (.metadata: {error}): load another checkpoint") from None


def load_state(
    path: Path, saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Load what `state_to_save` gave, in place; called on all ranks together.

    A checkpoint that cannot be read to the end spoils the values of the model.

    Args:
        path: of the checkpoint.
        saved: what `read_entries` gives.
        model: as it was saved.
        optimizer: of the dense parameters.

    Returns:
        Random states of the rank that had this one's number, by generator; empty if there was none.

    Raises:
        ValueError: the checkpoint lacks something that the model has, or cannot be read.
    """
    model_state, tables = model.state_dict(), _tables_optimizer_state(model)
    state = _in_place(model_state, tables)
    missing = sorted(name for name in state if name not in saved)
    if missing:
        raise ValueError(
            f"{path} lacks {missing[0]} (and {len(missing) - 1} more); a checkpoint fits the model that wrote it: use "
            "that model, or another checkpoint"
        )
    names = _dense_names(model, optimizer)
    # A tensor-parallel rank has layers of its own; those of its peers are in the checkpoint too.
    dense = {
        name: found
        for name, found in saved.items()
        if name.startswith(_DENSE) and name.removeprefix(_DENSE).rsplit("/", 1)[0] in names
    }
    random = {name: found for name, found in saved.items() if name in _own_random_state()}
    for name, found in (dense | random).items():
        state[name] = torch.empty(found.size, dtype=found.properties.dtype)
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:  # of any rank, on every rank
        raise ValueError(f"{path} cannot be read ({_describe_failure(error)}): load another checkpoint") from None
    model.load_state_dict(model_state)
    if tables:
        fused: Any = model.fused_optimizer
        fused.load_state_dict({"state": tables})
    for key in dense:
        name, slot = key.removeprefix(_DENSE).rsplit("/", 1)
        # A step count stays where the optimizer keeps it, on the host.
        value = state[key] if state[key].dim() == 0 else state[key].to(names[name].device)
        optimizer.state[names[name]][slot] = value
    return {name.rsplit("/", 1)[1]: state[name] for name in random}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write what `state_to_save` gave into a folder; called on all ranks together.

    Raises:
        OSError: a rank could not write its part.
    """
    try:
        dcp.save(state, checkpoint_id=path)
    except CheckpointException as error:  # of any rank, on every rank
        raise OSError(_describe_failure(error)) from None


def _describe_failure(error: CheckpointException) -> str:
    """The first rank that failed and why, in one line."""
    rank, failure = next(iter(error.failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {textwrap.shorten(str(cause), 160, placeholder=' …') or type(cause).__name__}"


def _in_place(model_state: dict[str, Any], tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is saved, and loaded, where it lies: the model, and the state of the optimizers of its tables."""
    of_tables = {f"{_TABLES}{table}/{slot}": value for table, slots in tables.items() for slot, value in slots.items()}
    return {_MODEL + name: value for name, value in model_state.items()} | of_tables


def _tables_optimizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """State of the optimizers that train tables during the backward pass, by table and slot."""
    fused: Any = getattr(model, "fused_optimizer", None)
    return {} if fused is None else fused.state_dict()["state"]


def _dense_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by the names that the model gives them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _own_random_state() -> dict[str, torch.Tensor]:
    """The random states of this rank, by names that say whose they are."""
    return {f"{_RANDOM}{dist.get_rank()}/{name}": state for name, state in random_state().items()}
