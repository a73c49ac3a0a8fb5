"""What batches of different ranks must have in common before their rows can be mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from commons.sequence_batch.batch_tree import Constant, Node, Path, parse
from commons.sequence_batch.fields import ROW_COUNT_FIELDS
from commons.sequence_batch.plain_values import canonical_plain, encode_plain


def describe_structure(batch: Any, varying: Collection[Path] = ()) -> dict[str, Any]:
    """Kinds, dtypes, the shape of a row and metadata of a batch, by path, as JSON holds them.

    Args:
        batch: any batch.
        varying: paths of sequences whose width may differ.

    Raises:
        TypeError: metadata that JSON cannot hold.
    """
    described: dict[str, Any] = {}
    _describe(parse(batch), (), varying, described)
    return described


def structure_digest(described: dict[str, Any]) -> int:
    """63 bits that are equal for equal structures; never 0."""
    text = json.dumps(described, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1 | 1


def raise_for_difference(described: list[dict[str, Any] | None]) -> None:
    """Raise ValueError for ranks whose batches differ; None stands for a rank without a batch."""
    ranks = [rank for rank, each in enumerate(described) if each is not None]
    first = described[ranks[0]] or {}
    for rank in ranks[1:]:
        other = described[rank] or {}
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            shown = "; ".join(f"{name!r}: {first.get(name)} and {other.get(name)}" for name in names[:3])
            raise ValueError(
                f"the batches of ranks {ranks[0]} and {rank} differ: {shown}; rows can be mixed where type, keys, "
                "dtypes, shapes of rows and metadata are the same on all ranks: make them equal, or name what "
                "differs in width in Trim.fields"
            )


def _describe(node: Node, path: Path, varying: Collection[Path], described: dict[str, Any]) -> None:
    name, value = ".".join(map(str, path)), node.value
    if node.leaf_type is not None:
        traits = node.leaf_type.traits(value)
        if path in varying:
            traits["row shape"] = ("any", *traits["row shape"][1:])
        if "device" in traits:
            traits["device"] = traits["device"].type
        described[name] = " ".join([type(value).__name__, *(f"{key} {trait}" for key, trait in traits.items())])
    elif node.kind is None:
        plain = encode_plain(value.value if isinstance(value, Constant) else value, path)
        described[name] = canonical_plain(plain)  # equal dicts are equal in any order
    else:
        described[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        for key, child in node.children.items():
            if not (node.kind == "dataclass" and key in ROW_COUNT_FIELDS):
                _describe(child, (*path, key), varying, described)
