"""What the cases share: masks by name, and the blocks of every kernel."""

from __future__ import annotations

from hstu.model import triton_launch
from hstu.model.triton_blocks import KERNELS, Blocks

MASKS = {
    "causal": {},
    "groups": {"target_group_size": 3},
    "groups and context": {"target_group_size": 2, "contextual": True},
    "full": {"is_causal": False},
}


def use_blocks(monkeypatch, queries=16, keys=16):
    blocks = dict.fromkeys(KERNELS, Blocks(queries, keys, 4, 2))
    monkeypatch.setattr(triton_launch, "choose_blocks", lambda *_: blocks)
