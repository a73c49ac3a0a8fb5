"""How many sequences a second does one worker of the loader assemble?

Generated data with histories of mean 165, as in MovieLens-1M, read by only the main process, by one worker process and
by two; shuffled, batches of 32 and 256 users, whole histories kept. The first epoch reads and decodes the shards; it is
reported separately from later epochs, whose row groups are in memory. The rate per CPU second is a worker's rate with
its own core: it includes assembling and sending batches, and the first epoch.

    python -m benchmarks.loader            12,000 users
    python -m benchmarks.loader --quick    a few users; writes no results page
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, every, measured
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.generated_ratings import generate_ratings

_TARGET = 20_000
_MAX_HISTORY = 2_400  # longer than any history


def measure_loader(batch: int, workers: int, *, folder: Path, epochs: int) -> dict[str, float]:
    """Sequences per second of the first epoch, and the median of later epochs."""
    loader = get_data_loader(
        "ml-1m",
        dataset_path=folder,
        batch_size=batch,
        max_history_seqlen=_MAX_HISTORY,
        shuffle=True,
        num_workers=workers,
    )
    rates, total, items = [], 0, 0
    used = _cpu_seconds(workers)
    for _ in range(epochs + 1):
        start, sequences, items = time.perf_counter(), 0, 0
        for each in loader:
            sequences += each.actual_batch_size
            items += int(each.features.length_per_key()[-2])
        rates.append(sequences / (time.perf_counter() - start))
        total += sequences
    if workers:
        del each
        loader._iterator = None  # ends the workers, after which their CPU time is available
        gc.collect()
    used = _cpu_seconds(workers) - used
    return {
        "mean length": items / sequences,
        "first epoch, seq/s": rates[0],
        "later epochs, seq/s": float(np.median(rates[1:])),
        "seq per CPU second": total / used,
        "M items per CPU second": total / used * items / sequences / 1e6,
    }


def _cpu_seconds(num_workers: int) -> float:
    """CPU time of the ended workers, or of this process if it assembles the batches itself."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN if num_workers else resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    users = 600 if quick else 12_000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generate_ratings(folder, num_users=users, test_fraction=0.0, show_progress=True)
        cases = every(batch=(32, 256), workers=(0, 1, 2))
        rows = measured(measure_loader, cases, folder=folder, epochs=2 if quick else 5)
    page = Page(
        "Loader",
        f"{users:,} generated users of mean length 165; later epochs are a median of five. The main process and its "
        "workers share the cores; the numbers per CPU second are the rates of a worker with its own core.",
        threads="; one thread per process",
    )
    slowest = min(row["later epochs, seq/s"] for row in rows if row["workers"] == 1)
    page.target("a worker, sequences/s", f"≥ {_TARGET:,}", f"{slowest:,.0f}", slowest >= _TARGET)
    page.section("", rows)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
