"""What runs have written into their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step, none of which stands there twice."""
    trained = [line for line in lines(run_dir) if "loss" in line]
    assert len({line["step"] for line in trained}) == len(trained)
    return {line["step"]: line["loss"] for line in trained}
