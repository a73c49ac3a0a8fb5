"""How fast is preprocessing, and how much memory does it take?

A generated MovieLens-20M archive of the published size, 20 million ratings, and generated KuaiRand archives, each
preprocessed by its own process. Rows per second cover the whole command: listing and hashing the archive, reading,
partitioning, sorting, writing. Peak memory is the largest resident size of that process.

    python -m benchmarks.preprocess            20 million and 11.7 million rows
    python -m benchmarks.preprocess --large    also KuaiRand-27K, 322 million rows: 30 GB of disk, ten minutes; writes
                                               the results page
    python -m benchmarks.preprocess --quick    a tenth of the first two
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.raw_data import GENERATORS
from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, every, measured, run_program

_SIZE = tyro.conf.create_mutex_group(required=False)
_TARGET_ROWS, _TARGET_GIB = 1e6, 2.0
_DATASETS = {"ml-20m": ("ml-20m.zip", 13_849), "kuairand-1k": ("KuaiRand-1K", 100)}  # archive, and users if quick
_LARGE = {"kuairand-27k": ("KuaiRand-27K", None)}
# The child imports only what the preprocessor needs, so that its memory is that of preprocessing.
_CHILD = """
import json, resource, sys, time
from commons.datasets.public.registry import PUBLIC_DATASETS
from commons.datasets.sequences.file import SequenceFile
name, source, folder = sys.argv[1:]
start = time.perf_counter()
path = PUBLIC_DATASETS[name].preprocess(source, folder)
seconds = time.perf_counter() - start
metadata = SequenceFile(path, name, []).metadata
size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
print(json.dumps([metadata.num_interactions, metadata.num_users, seconds, len(metadata.shards), size,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def measure_preprocessing(dataset: str, quick: bool) -> dict[str, Any]:
    """The fastest of some runs; the first run brings the archive into the page cache."""
    archive, few = (_DATASETS | _LARGE)[dataset]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, archive)
        GENERATORS[dataset](source, show_progress=True, **({"num_users": few} if quick else {}))
        command = [sys.executable, "-c", _CHILD, dataset, str(source), folder]
        runs = [json.loads(run_program(command)) for _ in range(1 if quick or dataset in _LARGE else 3)]
    count, users, seconds, shards, num_bytes, peak = min(runs, key=lambda run: run[2])
    return {
        "users": f"{users:,}",
        "rows": f"{count:,}",
        "seconds": seconds,
        "M rows/s": count / seconds / 1e6,
        "peak memory, GiB": peak / 2**30,
        "result": f"{shards} shards, {num_bytes / 2**20:,.0f} MiB",
    }


def main(quick: Annotated[Quick, _SIZE] = False, large: Annotated[bool, _SIZE] = False) -> None:
    """Measure; with `large`, write benchmarks/results/preprocess.md.

    Args:
        large: KuaiRand-27K too; needs 30 GB of disk.
    """
    rows = measured(measure_preprocessing, every(dataset=_DATASETS | _LARGE if large else _DATASETS), quick=quick)
    page = Page(
        "Preprocessing",
        f"Target: at least {_TARGET_ROWS / 1e6:.0f} M rows/s on two cores and at most {_TARGET_GIB:.0f} GB at 20 M "
        "rows. The fastest of three runs, each a process of its own (one run of KuaiRand-27K).",
        threads="",
    )
    page.section("", rows)
    page.finish(quick=not large)


if __name__ == "__main__":
    from_command_line(main, __doc__)
