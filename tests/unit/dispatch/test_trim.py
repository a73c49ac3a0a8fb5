"""Padded sequences: only columns that are padding in every row are cut, and results come back as wide as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from commons.dispatch import Trim, trim_batch
from commons.dispatch.trim import Window, untrim
from commons.dispatch.widen import Padding, join_trimmed, padding_of
from commons.sequence_batch.rows import Rows

lengths = st.lists(st.integers(0, 6), max_size=5)


def padded(lengths, width, side):
    """Row r holds r + 1 where it has tokens; with "both" the tokens begin in column 2."""
    columns = torch.arange(width)
    counts = torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    if side == "left":
        mask = columns >= width - counts
    else:
        first = 2 if side == "both" else 0
        mask = (columns >= first) & (columns < first + counts)
    rows = torch.arange(1, len(lengths) + 1).unsqueeze(1)
    return {"mask": mask, "ids": mask * rows, "three": (mask * rows).unsqueeze(-1).expand(-1, -1, 3).numpy()}


@given(lengths, st.integers(0, 3), st.sampled_from(["left", "right", "both"]))
def test_only_padding_is_cut(lengths, spare, side):
    batch = padded(lengths, 8 + spare, side)
    result, (window,) = trim_batch(batch, Trim("mask", side=side))
    longest = max([*lengths, 1])
    assert {value.shape[1] for value in result.values()} == {longest}
    assert np.array_equal(result["three"], batch["three"][:, window.start : window.stop])
    for name in ("mask", "ids"):
        assert torch.equal(untrim(result[name], window), batch[name])
    assert batch["ids"].shape[1] == window.width == 8 + spare


@given(st.lists(lengths, min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_batches_of_different_widths_are_lined_up(parts, side):
    batches = [padded(part, 6 + index, side) for index, part in enumerate(parts)]
    trim = Trim("mask", fields=["ids", ("three",)], side=side, fill={"ids": -7})
    trimmed, cut = zip(*(trim_batch(batch, trim) for batch in batches))
    found = [padding_of(Rows.of(batch), [trim], windows) for batch, windows in zip(batches, cut)]
    padding = Padding([20], {"'three'": 0} | Padding.of(dict(enumerate(found))).values)
    joined, (window,) = join_trimmed([Rows.of(batch) for batch in trimmed], cut, [trim], padding)
    width = max(batch["ids"].shape[1] for batch in trimmed)
    columns = (20 - width, 20) if side == "left" else (0, width)
    assert window == Window("mask", *columns, 20, (("mask",), ("ids",), ("three",)))
    ends = np.cumsum([len(part) for part in parts])
    for before, start, end in zip(trimmed, [0, *ends], ends):
        after = {name: value[start:end] for name, value in joined.batch.items()}
        missing = width - before["ids"].shape[1]
        kept = slice(missing, width) if side == "left" else slice(0, width - missing)
        assert after["ids"].shape[1] == after["mask"].shape[1] == after["three"].shape[1] == width
        assert torch.equal(after["ids"][:, kept], before["ids"])
        assert int((after["ids"] == -7).sum()) == missing * len(after["ids"])
        assert int(after["mask"].sum()) == int(before["mask"].sum())


def test_several_kinds_of_sequences_in_a_tensordict():
    prompts, answers = padded([2, 1], 5, "left"), padded([1, 3], 6, "right")
    batch = TensorDict(
        {"prompt": {"mask": prompts["mask"], "ids": prompts["ids"]}, "mask": answers["mask"], "ids": answers["ids"]},
        batch_size=[2],
    )
    trims = [Trim(("prompt", "mask"), side="left"), Trim("mask")]
    result, windows = trim_batch(batch, trims)
    assert result["prompt", "ids"].shape == (2, 2) and result["ids"].shape == (2, 3)
    assert [(window.start, window.stop) for window in windows] == [(3, 5), (0, 3)]
    assert [window.name for window in windows] == ["prompt.mask", "mask"]
    assert windows[0].fields == (("prompt", "mask"), ("prompt", "ids"))


def test_a_field_that_has_the_shape_by_chance_is_spared_where_fields_are_stated():
    batch = padded([2, 3], 8, "right") | {"embedding": torch.rand(2, 8)}
    assert trim_batch(batch, Trim("mask", fields=["ids"]))[0]["embedding"].shape == (2, 8)
    assert trim_batch(batch, Trim("mask"))[0]["embedding"].shape == (2, 3)


def test_nothing_to_cut_copies_nothing():
    batch = padded([8, 3], 8, "right")
    assert trim_batch(batch, Trim("mask"))[0]["ids"] is batch["ids"]
    assert trim_batch(batch, [])[0]["ids"] is batch["ids"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "mask is None and lengths is None; one of them says how long a row is"),
        ({"mask": "m", "lengths": "n"}, "mask is 'm' and lengths is 'n'"),
        ({"lengths": "n"}, "fields is None; they are a list of the fields that are cut"),
        ({"mask": "m", "fields": "ids"}, "fields is 'ids'"),
        ({"mask": "m", "side": "top"}, "side is 'top'"),
        ({"lengths": "n", "fields": ["ids"], "side": "both"}, "side is 'both' with mask None"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Trim(**settings)


@pytest.mark.parametrize(
    ("trim", "error", "message"),
    [
        (Trim("nowhere"), KeyError, "no field 'nowhere' to trim by; its fields are 'ids', 'mask', 'n', 'short'"),
        (Trim("n"), ValueError, r"mask 'n' has shape \(2,\); it is `\(rows, width\)`"),
        (Trim("mask", fields=["n"]), ValueError, r"'n' is a Tensor of shape \(2,\); padded sequences are"),
        (Trim("mask", fields=["short"]), ValueError, "different widths {'mask': 8, 'short': 5}"),
        (Trim(lengths="n", fields=["short"]), ValueError, r"lengths 'n' lie in \[2, 7\], the sequences are 5 wide"),
        (Trim(lengths="mask", fields=["ids"]), ValueError, r"lengths 'mask' have shape \(2, 8\) and dtype torch.bool"),
    ],
)
def test_a_trim_that_does_not_fit(trim, error, message):
    batch = padded([2, 3], 8, "right") | {"n": torch.tensor([2, 7]), "short": torch.zeros(2, 5)}
    with pytest.raises(error, match=message):
        trim_batch(batch, trim)


def test_results_of_another_width():
    _, (window,) = trim_batch(padded([2, 3], 8, "right"), Trim("mask"))
    with pytest.raises(ValueError, match=r"'score' is a Tensor of shape \(2,\); results per token have 3 columns"):
        untrim({"score": torch.zeros(2)}, window)
    with pytest.raises(TypeError, match="trim holds a str; it is a Trim or a list of them"):
        trim_batch(padded([2], 4, "right"), ["mask"])
