"""Everything that only a GPU can tell, in under half an hour and on one page, benchmarks/results/on_device.md.

What compiling kernels takes, the cases of tests/gpu (on one GPU two ranks share it), the pipelines under torch's CUDA
sanitizer, what the exchange and HSTU's attention cost, a traced training step, and what balancing gains in time, every
rank's batch in turn on one GPU. Every part has a process and a time limit of its own: the page says what failed, and
the others go on. What they print is in runs/on_device while they run.

Examples:
    python -m benchmarks.on_device
    python -m benchmarks.on_device --only exchange balance
    python -m benchmarks.on_device --rehearse          # the same code on the CPU; its sizes tell nothing
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from benchmarks import device_parts
from benchmarks.command_line import from_command_line
from benchmarks.report import RESULTS, heading
from commons.console import print_error

PartName = Literal["warm_up", "cases", "layers", "sanitizer", "exchange", "attention", "step", "balance"]
TITLE = "On a GPU"
_ENDED = 124  # what timeout(1) returns for a program that it has ended
LOGS = Path("runs", "on_device")  # what the parts print, while they run


@dataclass(frozen=True)
class Part:
    """One section of the page."""

    title: str
    seconds: float  # after which it is ended
    measure: Callable[[torch.device], str]  # makes the section's text; on the CPU it is a rehearsal


PARTS: dict[PartName, Part] = {
    "warm_up": Part("Compilation", 300, device_parts.warm_up),
    "cases": Part("Cases of tests/gpu", 420, device_parts.cases_on_device),
    "layers": Part("Cases of HSTU's layers", 300, device_parts.cases_of_layers),
    "sanitizer": Part("Pipelines under torch's CUDA sanitizer", 180, device_parts.cases_under_sanitizer),
    "exchange": Part("Finishing a shuffle", 60, device_parts.exchange),
    "attention": Part("HSTU's attention", 180, device_parts.attention),
    "step": Part("A traced training step", 120, device_parts.traced_step),
    "balance": Part("Balance in time", 150, device_parts.balance),
}


def main(
    only: tuple[PartName, ...] = tuple(PARTS),
    rehearse: bool = False,
    output: Path | None = None,
) -> int:
    """Run the parts and write the page; the exit status is 1 if one of them failed, 2 without a GPU.

    Args:
        only: the parts to run.
        rehearse: on the CPU, with small sizes; the page is printed, and written only where `output` says.
        output: the page; benchmarks/results/on_device.md unless told.
    """
    device = torch.device("cpu" if rehearse else "cuda")
    if not rehearse and not torch.cuda.is_available():
        print_error("no CUDA device is visible; this is what only a GPU can tell: use --rehearse to run it on the CPU")
        return 2
    sections, failed = [], []
    for name in only:
        print(f"== {PARTS[name].title}", file=sys.stderr, flush=True)
        text, fine = _run(name, device.type)
        sections.append(text)
        failed += [] if fine else [name]
    page = "\n\n".join([_head(device, rehearse, failed), *sections]) + "\n"
    print(page)
    if output is None and not rehearse:
        output = RESULTS / "on_device.md"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page)
    return 1 if failed else 0


def print_part(name: PartName, kind: str) -> int:
    """Run one part in this process and print its section; the exit status is 1 if something in it failed."""
    try:
        print(PARTS[name].measure(torch.device(kind)))
    except device_parts.PartFailedError as error:
        print(error)
        return 1
    return 0


def _run(name: PartName, kind: str) -> tuple[str, bool]:
    """A part in a process of its own: its section, and whether nothing failed."""
    program = "import sys; from benchmarks.on_device import print_part; sys.exit(print_part(*sys.argv[1:]))"
    started, limit = time.monotonic(), PARTS[name].seconds * (3 if kind == "cpu" else 1)  # whose cores may be shared
    output, log = LOGS / f"{name}.md", LOGS / f"{name}.log"
    # A part that does not end gets SIGTERM, at which torchrun ends its ranks, and SIGKILL a minute later.
    command = ["timeout", "--kill-after=60", str(limit), sys.executable, "-c", program, name, kind]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as out, log.open("w") as err:
        status = subprocess.run(command, cwd=device_parts.ROOT, stdout=out, stderr=err, check=False).returncode
    text = output.read_text().strip()
    ended = status in (_ENDED, -signal.SIGKILL)
    if ended:
        text += f"\n\nIt was ended after {limit:.0f} s."
    if ended or not text:
        text += "\n".join(
            ["", "", f"The last lines of `{log}`:", "", "```", *log.read_text().splitlines()[-20:], "```"]
        )
    verdict = "" if status == 0 else " · **failed**"
    return f"## {PARTS[name].title}\n\n{time.monotonic() - started:.0f} s{verdict}\n\n{text.strip()}", status == 0


def _head(device: torch.device, rehearse: bool, failed: list[PartName]) -> str:
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torchrec", "fbgemm-gpu", "triton"))
    lines = [heading(TITLE, "python -m benchmarks.on_device" + (" --rehearse" if rehearse else "")).rstrip()]
    if rehearse:
        lines.append("A rehearsal on the CPU: the code has run, the numbers tell nothing.")
    else:
        gpu = torch.cuda.get_device_properties(device)
        lines.append(
            f"{torch.cuda.device_count()} × {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability "
            f"{gpu.major}.{gpu.minor}, CUDA {torch.version.cuda}; {packages}."
        )
    lines.append(f"**Failed: {', '.join(failed)}.**" if failed else "Every part that was asked for has run.")
    return "\n\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "–"


if __name__ == "__main__":
    sys.exit(from_command_line(main, __doc__))
