"""How much faster is beam search with a key/value cache, and does it find the same items?

Without the cache every beam's whole sequence is computed again for every further code. With it, a history is computed
once, its keys and values serve all beams, and a step computes one token per beam. Both are taken in turn, batch after
batch; the ratio is the median of their ratios.

Examples:
    python -m benchmarks.beam_search
    python -m benchmarks.beam_search --quick
    python -m benchmarks.beam_search --beam-width 50 --num-layers 8
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.report import Page, one_rank, rows_table
from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution
from commons.datasets.sids.map import SIDMap
from commons.datasets.sids.random import random_sid_map
from sid_gr.model import SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.parallel import initialize_model_parallel

CODEBOOK_SIZES = (500, 500, 500, 500)
NUM_ITEMS = 10_000


@dataclass(frozen=True)
class Args:
    """What to measure."""

    histories: tuple[int, ...] = (16, 64, 256)  # items of every history, one table row each
    num_rows: int = 16  # users of a batch
    beam_width: int = 10  # items generated for each
    hidden_size: int = 64  # width of the decoder
    num_layers: int = 4  # its layers
    num_attention_heads: int = 4  # its heads
    repeats: int = 5  # batches per row of the table
    quick: bool = False  # one short history and two batches, to see it run; no page is written

    def __post_init__(self) -> None:
        if self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}; each head "
                "takes an equal part of the width: choose a multiple"
            )


def make_model(args: Args, sid_map: SIDMap, longest: int) -> SIDGRModel:
    """A decoder with random weights; their values do not change what is computed."""
    torch.manual_seed(0)
    config = SIDGRConfig(
        CODEBOOK_SIZES, longest + 1, args.hidden_size, args.num_layers, args.num_attention_heads, init_method_std=0.1
    )
    trie = SIDTrie(sid_map.codes, CODEBOOK_SIZES)
    return SIDGRModel(config, trie=trie, beam_width=args.beam_width).eval()


def make_batch(args: Args, sid_map: SIDMap, history: int, seed: int) -> GPTSIDBatch:
    """Users with histories of one length."""
    return GPTSIDBatch.random(
        args.num_rows,
        CODEBOOK_SIZES,
        history,
        0,
        history_dist=RandomDistribution("uniform", low=history, high=history),
        sids=torch.from_numpy(sid_map.codes),
        device="cpu",
        generator=torch.Generator().manual_seed(seed),
    )


def measure(model: SIDGRModel, batch: GPTSIDBatch, use_cache: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Seconds of one generation, the items and their log-probabilities."""
    started = time.perf_counter()
    found = model.generate(batch, use_cache=use_cache)
    return time.perf_counter() - started, found.leaves, found.log_probs


def measure_history(args: Args, model: SIDGRModel, sid_map: SIDMap, history: int) -> dict[str, Any]:
    """One row of the table."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    difference, same = 0.0, []
    for repeat in range(args.repeats + 1):
        batch = make_batch(args, sid_map, history, repeat)
        results = {use_cache: measure(model, batch, use_cache) for use_cache in (True, False)}
        difference = max(difference, float((results[True][2] - results[False][2]).abs().max()))
        same.append(float((results[True][1] == results[False][1]).float().mean()))
        if repeat:  # the first batch warms up
            for use_cache in (True, False):
                seconds[use_cache].append(results[use_cache][0])
    ratio = statistics.median(slow / fast for fast, slow in zip(seconds[True], seconds[False]))
    return {
        "items per history": history,
        "with cache, ms": statistics.median(seconds[True]) * 1e3,
        "without, ms": statistics.median(seconds[False]) * 1e3,
        "faster (median of batches)": f"{ratio:.1f}×",
        "largest difference of a log-probability": f"{difference:.0e}",
        "same items at the same places": f"{statistics.mean(same):.1%}",
    }


def main(args: Args) -> None:
    """Measure, print and write the report."""
    torch.set_num_threads(1)
    if args.quick:
        args = replace(args, repeats=2, num_rows=4, histories=args.histories[:1])
    page = Page(
        "beam_search",
        "Beam search with and without a key/value cache",
        "python -m benchmarks.beam_search",
        f"{args.num_rows} users, beams of {args.beam_width}, {NUM_ITEMS:,} items of four codes, codebooks of 500; "
        f"hidden {args.hidden_size}, {args.num_layers} layers, {args.num_attention_heads} heads, float32; one thread, "
        f"medians of {args.repeats} batches, both ways in turn. A history has four tokens per item, and BOS.",
    )
    with one_rank():
        initialize_model_parallel()
        sid_map = random_sid_map(NUM_ITEMS, CODEBOOK_SIZES)
        model = make_model(args, sid_map, max(args.histories))
        histories = tqdm(args.histories, desc="histories")
        page.section("", rows_table([measure_history(args, model, sid_map, history) for history in histories]))
    page.finish(quick=args.quick)


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
