"""A text from one rank to all ranks: bytes in a tensor, over the default group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commons.trainer.collectives import broadcast


def broadcast_text(text: str, device: torch.device, src: int = 0) -> str:
    """The text that one rank gives; called on all ranks together.

    Args:
        text: on that rank; ignored elsewhere.
        device: of this rank.
        src: that rank.
    """
    encoded = torch.tensor(list(text.encode()) if dist.get_rank() == src else [], dtype=torch.uint8, device=device)
    size = torch.tensor(encoded.numel(), device=device)
    broadcast(size, "broadcast of a text's size", src)
    if dist.get_rank() != src:
        encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    broadcast(encoded, "broadcast of a text", src)
    return bytes(encoded.tolist()).decode()
