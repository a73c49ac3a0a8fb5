"""The demo: a semantic-ID decoder trained on two ranks, once without and once with balancing.

generated ratings ─► semantic IDs ─► ranks that train both ways ─► two run folders ─► evenrank report.

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
import torch
import torch.distributed as dist

from commons.checks import Count
from commons.datasets.public.movielens import SCHEMA
from commons.datasets.sequences.file import SequenceFileMetadata
from commons.datasets.sids.assignment import assign_sids
from commons.datasets.sids.histories import PreprocessedHistories
from commons.datasets.sids.map import SIDMap
from commons.trainer import demo
from commons.trainer.config.load import load_config
from commons.trainer.ranks.errors import run_main
from sid_gr.metrics import GenerationMetrics
from sid_gr.model import GenerationOutput
from sid_gr.model.beam_search import GeneratedItems
from sid_gr.model.decoder import candidate_codes
from sid_gr.recipe import SIDGRRecipe
from sid_gr.train_config import TrainConfig

TITLE = "SID-GR on generated data with MovieLens-1M's format and lengths"


@dataclass
class DemoOptions(demo.DemoOptions):
    """The model, the data and the length of the demo."""

    steps: Count = 240  # measured steps, each trained both ways; at most one epoch
    batch_size: Count = 8  # users per rank and step
    max_history_seqlen: Count = 512  # most ratings of a history; older ratings are cut off
    num_layers: Count = 2  # layers of the model; its other dimensions are the defaults
    codebook_sizes: tuple[int, ...] = (64, 64, 64)  # codes of each hierarchy
    run_dir: Path = Path("runs/demo-sid")  # folder for the data, the folders of both runs, report.html and report.png

    @property
    def map_path(self) -> Path:
        """The map from movies to semantic IDs."""
        return self.data_dir / "sids.parquet"


def main() -> None:
    """Prepare the data and start the ranks; in a process started by torchrun, train as one rank."""
    options = load_config(DemoOptions, sys.argv[1:], prog="python -m sid_gr.demo", description=__doc__)
    if not dist.is_torchelastic_launched():
        metadata = demo.prepare_data(options)
        sid_map = prepare_sids(options, metadata)
        codes = " × ".join(map(str, sid_map.codebook_sizes))
        data = f"{demo.describe_data(metadata)}\n{sid_map.num_items:,} movies, {codes} codes"
        demo.start_ranks("sid_gr.demo", options, data)
        return
    config: TrainConfig = options.training_config(TrainConfig, "sid_gr/configs/demo.toml")
    sid = dataclasses.replace(config.sid, map_path=str(options.map_path), codebook_sizes=options.codebook_sizes)
    demo.demo_as_rank(SIDGRRecipe, dataclasses.replace(config, sid=sid), options, TITLE, popularity)


def prepare_sids(options: DemoOptions, metadata: SequenceFileMetadata) -> SIDMap:
    """Make the map of all movies, or load it if an earlier run made it from the same data."""
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


def popularity(recipe: SIDGRRecipe) -> dict[str, dict[str, float]]:
    """Metrics of recommending the most frequent training items to every user, as a baseline; a collective call."""
    config, sid_map, trie = recipe.config, recipe.sid_map, recipe.trie
    beam_width = config.trainer.top_k_for_generation
    histories = PreprocessedHistories(Path(config.dataset.dataset_path or ""), SCHEMA, "train")
    users = np.arange(len(histories))
    rows = sid_map.rows_of(histories.tails(users, histories.lengths(users)))
    popular = np.argsort(-np.bincount(rows, minlength=sid_map.num_items), kind="stable")[:beam_width]
    leaves = trie.lookup(torch.from_numpy(sid_map.codes[popular]).to(trie.sids.device))
    metrics = GenerationMetrics(config.trainer.eval_metrics, beam_width, device=recipe.device)
    for batch in recipe.open_loaders()[1] or ():
        lengths = batch.code_lengths(batch.candidate_feature_name)[: batch.actual_batch_size]
        codes = candidate_codes(batch, int(lengths.sum())).to(leaves.device)
        ranking = leaves.expand(len(lengths), -1)
        found = GeneratedItems(ranking, torch.zeros_like(ranking, dtype=torch.float32))
        lengths = (lengths // batch.num_hierarchies).to(leaves.device)
        metrics.update(GenerationOutput(torch.zeros(()), 0, found, trie.lookup(codes), lengths))
    return {"the ten most popular, for everyone": metrics.compute()}


if __name__ == "__main__":
    run_main(main)
