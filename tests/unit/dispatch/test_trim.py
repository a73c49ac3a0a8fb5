"""Padded sequences: only padding of every row is cut, results come back as wide as they were, and rows of different
widths are filled with the padding that they have.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from commons.dispatch import Trim, redistribute_balanced, scatter_balanced, trim_batch
from commons.dispatch.trim import find_windows, untrim
from commons.dispatch.widen import Padding, join_trimmed, padding_of
from commons.sequence_batch.rows import Rows
from tests.helpers.batches.any_batches import as_values, concat_rows

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
    assert result["three"].base is None and result["ids"].untyped_storage().nbytes() == result["ids"].nbytes
    for name in ("mask", "ids"):
        assert torch.equal(untrim(result[name], window), batch[name])
    assert batch["ids"].shape[1] == window.width == 8 + spare
    if side != "both":
        numbers = (np.array(lengths[::-1], dtype=kind)[::-1] for kind in (np.uint16, np.uint64))
        for batch["n"] in (torch.tensor(lengths, dtype=torch.int64), *numbers):
            with torch.device("meta"):  # a script's default device, on which no data are
                again, _ = trim_batch(batch, Trim(lengths="n", fields=list(result), side=side))
            assert all(np.array_equal(again[name], result[name]) for name in result)


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
    share = scatter_balanced(batch, [1, 1], trim=trims)
    assert torch.equal(share.untrim(result["prompt", "ids"], ("prompt", "mask")), prompts["ids"])
    with pytest.raises(KeyError, match=r"mask is None, the batch was trimmed by \['prompt.mask', 'mask'\]; "):
        share.untrim(result["ids"])
    with pytest.raises(KeyError, match=r"mask is 'ids', the batch was trimmed by \['mask'\]; "):
        scatter_balanced(batch, [1, 1], trim=trims[1]).untrim(result["ids"], "ids")


def test_a_field_is_cut_by_one_trim_where_sequences_are_equally_wide():
    """Of prompts padded on the left and answers padded on the right, the second trim cut the prompts' tokens away."""
    prompts, answers = padded([2, 1], 5, "left"), padded([1, 3], 5, "right")
    batch = {"prompt": prompts["ids"], "its mask": prompts["mask"]} | answers
    trims = [Trim("its mask", side="left"), Trim("mask")]
    for call in (trim_batch, lambda batch, trims: scatter_balanced(batch, [1, 1], trim=trims)):
        with pytest.raises(ValueError, match=r"5 wide, and the trims by 'its mask' and by 'mask' both cut it; a field"):
            call(batch, trims)
    trim_batch({name: value[:0] for name, value in batch.items()}, trims)
    trims = [replace(trims[0], fields=["prompt"]), replace(trims[1], fields=["ids"])]
    result, _ = trim_batch(batch, trims)
    assert torch.equal(result["prompt"], prompts["ids"][:, 3:]) and torch.equal(result["ids"], answers["ids"][:, :3])


def test_a_field_that_has_the_shape_by_chance_is_spared_where_fields_are_stated():
    batch = padded([2, 3], 8, "right") | {"embedding": torch.rand(2, 8)}
    assert trim_batch(batch, Trim("mask", fields=["ids"]))[0]["embedding"].shape == (2, 8)
    assert repr(Trim("mask", fields=["ids"])) == repr(Trim("mask", fields=("ids",)))  # which ranks compare
    assert trim_batch(batch, Trim("mask"))[0]["embedding"].shape == (2, 3)


def test_nothing_to_cut_copies_nothing():
    batch = padded([8, 3], 8, "right")
    assert trim_batch(batch, Trim("mask"))[0]["ids"] is batch["ids"]
    assert trim_batch(batch, [])[0]["ids"] is batch["ids"]
    batch["n"] = torch.tensor([8, 3])
    assert trim_batch(batch, Trim(lengths="n", fields=["ids"]))[0]["ids"] is batch["ids"]
    _, (window,) = trim_batch(padded([0, 0], 0, "right"), Trim("mask"))
    assert (window.start, window.stop) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "mask is None and lengths is None; exactly one of them must be given"),
        ({"mask": "m", "lengths": "n"}, "mask is 'm' and lengths is 'n'"),
        ({"lengths": "n"}, "fields is None; it must be a list of the fields to cut"),
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
        (Trim("nowhere"), KeyError, "no field 'nowhere' to trim by; its fields are 'array', 'bytes', 'floats'"),
        (Trim("n"), ValueError, r"mask 'n' has shape \(2,\); it must be a tensor or array `\(rows, width\)`"),
        (Trim("three"), ValueError, r"mask 'three' has shape \(2, 8, 3\); it must be a tensor or array"),
        (Trim("nested"), ValueError, r"mask 'nested' has shape \(2, j\d+\); it must be a tensor or array"),
        (Trim("lists"), ValueError, r"mask 'lists' is a list; it must be a tensor or array .*: convert it"),
        (Trim("mask", fields=["n"]), ValueError, r"'n' is a Tensor of shape \(2,\); padded sequences must be"),
        (Trim("mask", fields=["short"]), ValueError, "different widths {'mask': 8, 'short': 6}"),
        (Trim(lengths="n", fields=["short"]), ValueError, r"lengths 'n' are in \[2, 7\], the sequences are 6 wide"),
        (Trim(lengths="minus", fields=["ids"]), ValueError, r"lengths 'minus' are in \[-1, 8\], the sequences are 8"),
        (Trim(lengths="truth", fields=["ids"]), ValueError, r"lengths 'truth' have shape \(2,\) and dtype torch.bool"),
        (Trim(lengths="half", fields=["ids"]), ValueError, r"lengths 'half' have shape \(2,\) and dtype torch.float32"),
        (Trim(lengths="ids", fields=["ids"]), ValueError, r"lengths 'ids' have shape \(2, 8\) and dtype torch.int64"),
        # A tokenizer without padding has pad_token_id None; -100 in uint8 would be 156, a label that is trained.
        (Trim("mask", fill={"ids": None}), ValueError, "fill of 'ids' is None, the field has dtype torch.int64; padd"),
        (Trim("mask", fill={"ids": 0.5}), ValueError, "fill of 'ids' is 0.5, the field has dtype torch.int64"),
        (Trim("mask", fill={"bytes": -100}), ValueError, "fill of 'bytes' is -100, the field has dtype torch.uint8"),
        (Trim("mask", fill={"array": 0.5}), ValueError, "fill of 'array' is 0.5, the field has dtype uint8"),
        (Trim("mask", fill={"array": 256}), ValueError, "fill of 'array' is 256, the field has dtype uint8"),
        (Trim("mask", fill={"floats": None}), ValueError, "fill of 'floats' is None, the field has dtype float32"),
    ],
)
def test_a_trim_that_does_not_fit(trim, error, message):
    batch = padded([2, 3], 8, "right") | {"n": torch.tensor([2, 7]), "short": torch.zeros(2, 6)}
    batch |= {"minus": torch.tensor([-1, 8]), "truth": torch.tensor([True, False]), "half": torch.tensor([0.5, 2])}
    batch["lists"] = [[1, 1], [1, 0]]
    batch["nested"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    batch |= {"bytes": torch.zeros(2, 8, dtype=torch.uint8), "array": np.zeros((2, 8), np.uint8)}
    batch["floats"] = np.zeros((2, 8), np.float32)
    with pytest.raises(error, match=message):
        trim_batch(batch, trim)


def test_results_of_another_width():
    _, (window,) = trim_batch(padded([2, 3], 8, "right"), Trim("mask"))
    for shape in ((2,), (2, 8)):
        message = f"'score' is a Tensor of shape {shape}; results per token have 3 columns"
        with pytest.raises(ValueError, match=re.escape(message)):
            untrim({"score": torch.zeros(shape)}, window)
    for trim, what in ((["mask"], "a str"), (128, "an int")):
        with pytest.raises(TypeError, match=f"trim contains {what}; it must be a Trim or a list of Trims"):
            trim_batch(padded([2], 4, "right"), trim)


NAN, DAY = float("nan"), np.datetime64("2026-01-01")


def texts(lengths, width):
    """Ids of 0 to 6 and their labels; the first token of a row is a prompt."""
    columns, counts = torch.arange(width), torch.tensor(lengths).unsqueeze(1)
    mask = columns < counts
    ids = torch.where(mask, (columns * 3 + counts) % 7, 0)
    return {"mask": mask, "ids": ids, "labels": torch.where(mask & (columns > 0), ids, -100)}


def joined(batches, trim):
    """What a rank makes of its own rows and those of others."""
    trimmed, cut = zip(*(trim_batch(batch, trim) for batch in batches))
    rows = [Rows.of(batch) for batch in batches]
    found = {rank: padding_of(each, [trim], find_windows(each, [trim])) for rank, each in enumerate(rows)}
    padding = Padding.of(found)
    assert padding.widths == [max(batch["ids"].shape[1] for batch in batches)]
    return join_trimmed([Rows.of(batch) for batch in trimmed], cut, [trim], padding)[0].batch


def sequences(fill, values, dtype=None):
    """Two rows of a field, one of them padded; and one of a rank where no row is."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    kind = np.array if dtype is None or isinstance(dtype, (str, type)) else torch.tensor
    padded = kind([[*values], [values[0], fill, fill]], dtype=dtype)
    full = kind([[*values, values[0]]], dtype=dtype)
    return [{"mask": mask, "ids": padded}, {"mask": torch.ones(1, 4, dtype=torch.int64), "ids": full}]


@pytest.mark.parametrize(
    ("fill", "values", "dtype"),
    [
        (-1.5, [1.0, 2.0, 3.0], torch.bfloat16),
        (NAN, [1.0, 2.0, 3.0], torch.float32),
        (-0.0, [1.0, 2.0, 0.0], torch.float64),
        (1 + 2j, [1j, 2, 3], torch.complex64),
        (True, [False, False, True], torch.bool),
        (9, [1, 2, 3], torch.uint16),
        (2**63, [1, 2, 3], torch.uint64),
        ("<pad>", ["a", "bc", "def"], "U9"),
        (None, ["a", {"b": 1}, 3], object),
        (DAY, [DAY + 1, DAY + 2, DAY + 3], "M8[D]"),
        (np.datetime64("NaT"), [DAY + 1, DAY + 2, DAY + 3], "M8[D]"),
    ],
    ids=repr,
)
def test_padding_of_any_kind(fill, values, dtype):
    batch = joined(sequences(fill, values, dtype), Trim("mask"))
    ids = batch["ids"].tolist()
    expected = sequences(fill, values, dtype)[0]["ids"][1, 1:2].tolist() * 3
    assert repr(ids[1]).replace("-0.0", "0.0") == repr([ids[0][0], *expected]).replace("-0.0", "0.0")
    assert repr(ids[0][3]) == repr(expected[0]).replace("-0.0", "0.0") and ids[2][:3] == ids[0][:3]
    assert batch["mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_a_hole_in_the_mask_is_no_padding():
    mask = torch.tensor([[1, 0, 1, 0]])
    batches = [{"mask": mask, "ids": torch.tensor([[5, 6, 7, 9]])}, {"mask": mask[:, :1], "ids": torch.tensor([[8]])}]
    assert joined(batches, Trim("mask"))["ids"].tolist() == [[5, 6, 7], [8, 9, 9]]


def test_stated_padding_needs_no_look():
    full = [texts([3], 3), texts([5], 5)]
    with pytest.raises(ValueError, match="no row has padding in 'ids', 'labels', and rows 3 to 5 wide need it"):
        joined(full, Trim("mask"))
    batch = joined(full, Trim("mask", fill={"labels": -100, ("ids",): 6}))
    assert batch["labels"][0].tolist()[3:] == [-100, -100] and batch["ids"][0].tolist()[3:] == [6, 6]
    for dtype in (torch.float32, torch.complex64, np.float32):  # a value that is rounded
        assert joined(sequences(0, [1, 2, 3], dtype), Trim("mask", fill={"ids": 0.1}))["ids"][0, 3] == pytest.approx(
            0.1
        )
    same = [texts([3], 3), texts([3, 3], 3)]
    assert as_values(joined(same, Trim("mask"))) == as_values(concat_rows(same))


def test_values_that_differ_beyond_the_tokens():
    batch = texts([3, 1], 3) | {"positions": torch.arange(3).expand(2, 3)}
    message = "'positions' is 1 and 2 beyond the tokens of its rows on rank 0; rows can be widened with one"
    with pytest.raises(ValueError, match=message + ".*state it in Trim, fill={'positions': 0} for example"):
        redistribute_balanced(batch, [1, 1], trim=Trim("mask"))
    moved = redistribute_balanced(batch, [1, 1], trim=Trim("mask", fill={"positions": 0}))
    assert torch.equal(moved.batch["labels"], batch["labels"])
    assert torch.equal(scatter_balanced(batch, [1, 1], trim=Trim("mask")).batch["labels"], batch["labels"])
    with pytest.raises(KeyError, match=re.escape("fill names 'label', the trim by 'mask' cuts 'mask', 'ids', 'labe")):
        trim_batch(batch, Trim("mask", fill={"label": -100}))
