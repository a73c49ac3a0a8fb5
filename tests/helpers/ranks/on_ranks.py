"""Tests whose body runs on every rank: `@on_two_ranks`, `@on_four_ranks`, or on two and then on four `@on_ranks`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist


def on(fixture: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of a module that all ranks call, each with the test's parameters.

    Args:
        fixture: has the pool of ranks, or another one whose `run` calls functions in a process.
        options: of the pool's `run`.
    """

    def make_test(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            given.pop(fixture).run(_call, body.__module__, body.__name__, given, **options)

        signature = inspect.signature(body)
        pool = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[pool, *signature.parameters.values()])  # type: ignore[attr-defined]
        return test

    return make_test


on_ranks, on_two_ranks, on_four_ranks = on("ranks"), on("two_ranks"), on("four_ranks")


def _call(module: str, name: str, given: Mapping[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


def of_all(items: Iterable[Any]) -> list[Any]:
    """The items of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(items))
    return [item for part in gathered for item in part]
