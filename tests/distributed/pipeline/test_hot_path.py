"""What one batch meets on its way: docs/architecture.md's table of types, and few files."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

import commons.pipeline
from commons.pipeline import balanced
from commons.sequence_batch import schema
from tests.helpers.batches.square_shuffler import SquareShuffler, my_batch
from tests.helpers.models.torchrec_model import AnyBatch
from tests.helpers.ranks.on_ranks import on_ranks

ROOT = Path(__file__).parents[3]
PACKAGES = str(Path(commons.pipeline.__file__).parents[1])
MOST_FILES, NUM_TYPES = 30, 11
# Runs where a rank has waited for another for a while, which happens on a busy machine.
WHERE_A_RANK_IS_LATE = {"distributed/channel/store.py"}


class _Calls:
    """Which of our files run, on every thread, and which of our classes are made."""

    def __init__(self):
        self.files, self.classes = set(), set()

    def __call__(self, frame, event, _):
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGES)
        if event != "call" or not (ours or code.co_filename == "<string>"):  # where dataclasses are made
            return
        if ours:
            self.files.add(str(Path(code.co_filename).relative_to(PACKAGES)))
        made = type(frame.f_locals.get("self"))
        if code.co_name == "__init__" and made.__module__.startswith("commons."):
            self.classes.add(made)


def _types_of_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("types\n") : page.index("## One protocol")]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| `([\w/]+)\.py` \|$", section, re.MULTILINE))


@on_ranks
def test_the_page_lists_the_types_that_a_batch_meets_and_they_stand_in_few_files():
    """Of five batches what all need, and what the fourth needs, from the loader to the end of its step."""
    first, fourth, moved = _Calls(), _Calls(), []
    threading.setprofile(lambda *event: current(*event))  # before the worker thread starts
    current = first
    sys.setprofile(first)
    shuffler, model = SquareShuffler(), AnyBatch(id)
    try:
        pipeline = balanced(TrainPipelineBase)(
            model, torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"), batch_shuffler=shuffler
        )
        batches = iter([my_batch(seed, [6, 4, 3, 5][: dist.get_world_size()]) for seed in range(8)])
        for step in range(5):
            if step == 3:
                shuffler.drain()
                current = fourth
                sys.setprofile(fourth)
            pipeline.progress(batches)
            if step == 3:
                shuffler.drain()
                sys.setprofile(None)
                current = _Calls()
            moved.append(pipeline.last_stats.moved)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        shuffler.close()
    names = {each.__name__: each.__module__.replace(".", "/") for each in first.classes | fourth.classes}
    parts = {name for name, each in vars(schema).items() if dataclasses.is_dataclass(each)} - {"BatchSchema"}
    parts |= {kind.__name__ for kind in schema.KINDS}
    made = {each.__name__ for each in filter(dataclasses.is_dataclass, fourth.classes)} - parts
    listed = _types_of_page()
    assert all(moved) and len(listed) == NUM_TYPES and made <= set(listed) and "Partition" not in names
    assert {name: f"commons/{file}" for name, file in listed.items()}.items() <= names.items()
    files = sorted(fourth.files - WHERE_A_RANK_IS_LATE)
    assert len(files) <= MOST_FILES, "\n".join(files)
