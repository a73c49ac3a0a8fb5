"""How much faster is beam search with a key/value cache, and does it find the same items?

Without the cache every beam's whole sequence is computed again for every code. With the cache, a history is computed
once, all beams use its keys and values, and a step computes one token per beam. Both are timed alternately, batch after
batch; the speed-up is the median over the batches.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, every, interleaved_seconds, measured, one_rank
from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution, codebook_offsets
from commons.datasets.hstu_batch import padded_kjt
from commons.datasets.sids.map import SIDMap, random_sid_map
from commons.sequence_batch.open_batch import real_rows
from sid_gr.model import SIDGRConfig, SIDGRModel, SIDTrie
from sid_gr.model.beam_search import GeneratedItems, beam_search
from sid_gr.parallel import initialize_model_parallel

CODEBOOK_SIZES = (500, 500, 500, 500)
NUM_ITEMS = 10_000
HISTORIES = (16, 64, 256)  # items of every history
BEAMS, HIDDEN, LAYERS, HEADS = 10, 64, 4, 4


def make_model(sid_map: SIDMap) -> SIDGRModel:
    """A decoder with random weights; their values do not change what is computed."""
    torch.manual_seed(0)
    config = SIDGRConfig(CODEBOOK_SIZES, max(HISTORIES) + 1, HIDDEN, LAYERS, HEADS, init_method_std=0.1)
    return SIDGRModel(config, trie=SIDTrie(sid_map.codes, CODEBOOK_SIZES), beam_width=BEAMS).eval()


@torch.no_grad()
def generate_without_cache(model: SIDGRModel, batch: GPTSIDBatch) -> GeneratedItems:
    """`SIDGRModel.generate`, but every beam's whole sequence is computed again for every code."""
    assert model.trie is not None
    rows, hierarchies = torch.arange(real_rows(batch)), model.config.num_hierarchies
    items = torch.zeros(len(rows), 1, hierarchies, dtype=torch.int64)  # of every beam; codes still to come are 0

    def scores_of(hierarchy: int) -> torch.Tensor:
        """Scores of the next code of every beam, `(num_rows, num_beams, codebook size)`."""
        num_beams = items.shape[1]
        repeated = batch.index_select(rows.repeat_interleave(num_beams))
        features, names = repeated.features, (repeated.history_feature_name, repeated.candidate_feature_name)
        device = features.values().device
        ids = (items + torch.tensor(codebook_offsets(model.config.codebook_sizes))).flatten().to(device)
        lengths = repeated.code_lengths(names[0])
        features = padded_kjt(
            dict(zip(names, (features[names[0]].values(), ids))),
            dict(zip(names, (lengths, torch.full_like(lengths, hierarchies)))),
            repeated.batch_size,
        )
        whole = dataclasses.replace(repeated, features=features, labels=None)
        embeddings, layout = model.embedding(features), model.dense.lay_out(whole)
        history, candidates = (embeddings[name].values() for name in names)
        hidden = model.dense.encode(history, candidates, layout)
        predicting = layout.predicting.view(-1, hierarchies)[:, hierarchy]
        return model.dense.logits(hidden[predicting], hierarchy).unflatten(0, (len(rows), num_beams))

    def next_logits(hierarchy: int, codes: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        nonlocal items
        items = items[rows[:, None], parents.cpu()]
        items[:, :, hierarchy - 1] = codes.cpu()
        return scores_of(hierarchy)

    return beam_search(model.trie, model.beam_width, scores_of(0)[:, 0], next_logits)


def measure_history(history: int, model: SIDGRModel, sid_map: SIDMap, users: int, repeats: int) -> dict[str, Any]:
    """A row of the table, of users with histories of one length."""
    batches = [
        GPTSIDBatch.random(
            users,
            CODEBOOK_SIZES,
            history,
            0,
            history_dist=RandomDistribution("uniform", low=history, high=history),
            sids=torch.from_numpy(sid_map.codes),
            device="cpu",
            generator=torch.Generator().manual_seed(repeat),
        )
        for repeat in range(repeats + 1)  # the first warms up
    ]
    ways: dict[bool, Callable[[GPTSIDBatch], GeneratedItems]]
    ways = {True: model.generate, False: partial(generate_without_cache, model)}
    found: dict[bool, list[Any]] = {True: [], False: []}

    def generate(use_cache: bool) -> None:
        found[use_cache].append(ways[use_cache](batches[len(found[use_cache])]))

    runs = {use_cache: partial(generate, use_cache) for use_cache in ways}
    seconds = interleaved_seconds(runs, repeats, clock=time.perf_counter, show=False)
    pairs = list(zip(found[True], found[False]))
    difference = max(float((cached.log_probs - plain.log_probs).abs().max()) for cached, plain in pairs)
    same = [float((cached.leaves == plain.leaves).float().mean()) for cached, plain in pairs]
    ratio = statistics.median(slow / fast for fast, slow in zip(seconds[True], seconds[False]))
    return {
        "with cache, ms": statistics.median(seconds[True]) * 1e3,
        "without, ms": statistics.median(seconds[False]) * 1e3,
        "faster (median of batches)": f"{ratio:.1f}×",
        "largest difference of a log-probability": f"{difference:.0e}",
        "same items at the same positions": f"{statistics.mean(same):.1%}",
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    users, repeats, histories = (4, 2, HISTORIES[:1]) if quick else (16, 5, HISTORIES)
    page = Page(
        "Beam search with and without a key/value cache",
        f"{users} users, beams of {BEAMS}, {NUM_ITEMS:,} items of four codes, codebooks of 500; hidden {HIDDEN}, "
        f"{LAYERS} layers, {HEADS} heads, float32; one thread, medians of {repeats} batches, run alternately. A "
        "history has four tokens per item, and BOS.",
    )
    with one_rank():
        initialize_model_parallel()
        sid_map = random_sid_map(NUM_ITEMS, CODEBOOK_SIZES)
        model = make_model(sid_map)
        options: dict[str, Any] = {"model": model, "sid_map": sid_map, "users": users, "repeats": repeats}
        page.section("", measured(measure_history, every(history=histories), **options))
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
