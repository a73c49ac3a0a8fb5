"""A text from rank 0 to all ranks: bytes in a tensor, over the default group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_text(text: str, device: torch.device) -> str:
    """The text that rank 0 gives; called on all ranks together.

    Args:
        text: on rank 0; ignored elsewhere.
        device: of this rank.
    """
    encoded = torch.tensor(list(text.encode()) if dist.get_rank() == 0 else [], dtype=torch.uint8, device=device)
    size = torch.tensor(encoded.numel(), device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(encoded, src=0)
    return bytes(encoded.tolist()).decode()
