"""The demo: a semantic-ID decoder trained on two ranks, as batches are loaded and balanced, side by side.

generated archive ─► preprocessor ─► semantic IDs ─► ranks that train both ways (demo_ranks) ─► table, picture, JSON.

Examples:
  python -m sid_gr.demo
  python -m sid_gr.demo --steps 20 --batch-size 32 --max-history-seqlen 1024
  python -m sid_gr.demo --quick --run-dir runs/quick-sid
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from commons.datasets.movielens import SCHEMA
from commons.datasets.sequence_file import SequenceFileMetadata
from commons.datasets.sid_assignment import assign_sids
from commons.datasets.sid_histories import PreprocessedHistories
from commons.datasets.sid_map import SIDMap
from commons.trainer.comparison import read_results, results_path
from commons.trainer.comparison_options import ComparisonOptions, choose_ranks, describe_data, prepare_data
from commons.trainer.comparison_report import Wording, report
from commons.trainer.config import load_config
from commons.trainer.errors import run_main
from commons.trainer.torchrun import torchrun

WORDING = Wording(
    title="SID-GR on generated data with MovieLens-1M's format and lengths",
    items="ratings",
    metrics={"HitRate@10": "HitRate@10", "NDCG@10": "NDCG@10"},
)
POPULARITY = "the ten most popular, for everyone"


@dataclass
class DemoOptions(ComparisonOptions):
    """What the demo trains, and for how long."""

    steps: int = 240
    """Steps that are measured, each trained both ways; at most one epoch."""

    batch_size: int = 8
    """Users per rank and step."""

    max_history_seqlen: int = 512
    """The most ratings of a user; older ones are cut off."""

    num_layers: int = 2
    """Layers of the model, whose other dimensions are those of ModelArgs."""

    codebook_sizes: tuple[int, ...] = (64, 64, 64)
    """Codes of each hierarchy."""

    run_dir: Path = Path("runs/demo-sid")
    """Folder for the data, demo.json and balance.png."""

    @property
    def map_path(self) -> Path:
        """The map from movies to semantic IDs."""
        return self.data_dir / "sids.parquet"


def parse_options() -> DemoOptions:
    """The options on the command line of this process.

    Raises:
        ValueError: an unknown option or a wrong value.
    """
    return load_config(DemoOptions, sys.argv[1:], prog="python -m sid_gr.demo", description=__doc__)


def main() -> None:
    """Prepare the data, start the ranks, report."""
    options = parse_options()
    console = Console()
    metadata = prepare_data(options)
    console.print(describe_data(metadata))
    sid_map = prepare_sids(options, metadata)
    console.print(f"semantic IDs: {sid_map.num_items:,} movies, {' × '.join(map(str, sid_map.codebook_sizes))} codes")
    num_ranks, where = choose_ranks(options.device)
    console.print(where)
    results_path(options.run_dir).unlink(missing_ok=True)
    status = torchrun(["--standalone", f"--nproc_per_node={num_ranks}", "-m", "sid_gr.demo_ranks", *sys.argv[1:]])
    if status:
        sys.exit(status)
    report(read_results(options.run_dir), options.run_dir, console, WORDING)


def prepare_sids(options: DemoOptions, metadata: SequenceFileMetadata) -> SIDMap:
    """Make the map of all movies; what an earlier run has made from the same data serves again."""
    made_from = {"users": metadata.num_users, "seed": options.seed}
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = SIDMap.load(options.map_path, options.codebook_sizes)
        if found.options.get("made_from") == made_from:
            return found
    num_items = metadata.vocabulary_sizes[SCHEMA.item_feature_name]
    histories = PreprocessedHistories(options.data_dir, SCHEMA, "train")
    made = assign_sids(histories, np.arange(num_items), options.codebook_sizes, seed=options.seed)
    sid_map = dataclasses.replace(made, options={**made.options, "made_from": made_from})
    sid_map.save(options.map_path)
    return sid_map


if __name__ == "__main__":
    run_main(main)
