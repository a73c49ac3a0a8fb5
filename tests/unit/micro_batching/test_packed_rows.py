"""Packed rows: tokens, positions, masks and labels of rows put end to end; gradients as of the padded batch."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from commons.micro_batching import MicroBatchSpec, count_loss_tokens, pack_micro_batches, pack_rows
from commons.sequence_batch.rows import select_rows

EXAMPLE = Path(__file__).parents[3] / "examples/gradient_accumulation.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("gradient_accumulation", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def padded(lengths, left=False):
    """A batch whose tokens say where they come from: row · 100 + place."""
    width = max(lengths)
    place = torch.arange(width).expand(len(lengths), width)
    if left:
        place = place - (width - torch.tensor(lengths)).unsqueeze(1)
    mask = (place >= 0) & (place < torch.tensor(lengths).unsqueeze(1))
    ids = (torch.arange(len(lengths)).unsqueeze(1) * 100 + place) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": place * mask,
        "labels": torch.where(mask, ids, -100),
        "log_probs": torch.stack([ids, -ids], dim=-1).double(),
        "reward": torch.arange(len(lengths)).double(),
    }


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_rows_end_to_end(left, multiple, lengths):
    batch = padded(lengths, left)
    packed = pack_rows(batch, mask="causal", pad_to_multiple_of=multiple)
    tokens = [row * 100 + place for row, length in enumerate(lengths) for place in range(length)]
    fill = -len(tokens) % multiple
    parts = lengths + [fill] * (fill > 0)

    assert packed.inputs["input_ids"].tolist() == [tokens + [0] * fill] and packed.num_tokens == len(tokens)
    positions = [place for length in parts for place in range(length)]
    assert packed.inputs["position_ids"].tolist() == [positions]
    labels = [-100 if token % 100 == 0 else token for token in tokens] + [-100] * fill
    assert packed.inputs["labels"].tolist() == [labels]
    assert packed.inputs["log_probs"].shape == (1, len(tokens) + fill, 2)
    assert torch.equal(packed.inputs["reward"], batch["reward"])
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [sum(parts[:row]) for row in range(len(parts) + 1)]
    assert packed.max_seqlen == max(parts)

    row_of = [row for row, length in enumerate(parts) for _ in range(length)]
    sees = packed.inputs["attention_mask"]
    assert sees.shape == (1, 1, len(row_of), len(row_of)) and sees.dtype == torch.bool
    full = pack_rows(batch, mask="block_diagonal", pad_to_multiple_of=multiple).inputs["attention_mask"]
    for query, row in enumerate(row_of):
        assert full[0, 0, query].tolist() == [row == other for other in row_of]
        assert sees[0, 0, query].tolist() == [row == other and key <= query for key, other in enumerate(row_of)]
    assert "attention_mask" not in pack_rows(batch).inputs

    # Outputs go back to where the tokens were.
    assert torch.equal(packed.unpack(packed.inputs["input_ids"]), batch["input_ids"])
    assert torch.equal(packed.unpack(packed.inputs["log_probs"]), batch["log_probs"])
    # The terms of the loss are the labels that a causal model's shift leaves.
    counts = count_loss_tokens(batch["labels"], batch["attention_mask"])
    assert counts.tolist() == [max(0, length - 1) for length in lengths]
    assert int((packed.inputs["labels"][:, 1:] != -100).sum()) == int(counts.sum())
    assert left or count_loss_tokens(batch["labels"]).tolist() == counts.tolist()


def test_nested_tensors_need_no_mask():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    hidden = torch.nested.nested_tensor_from_jagged(torch.arange(12.0).view(6, 2), ids.offsets())
    batch = TensorDict({"input_ids": ids, "hidden": hidden, "reward": torch.zeros(3)}, batch_size=[3])
    for multiple in (1, np.int64(4)):
        packed = pack_rows(batch, pad_to_multiple_of=multiple)
        assert packed.inputs["input_ids"][0, :6].tolist() == [1, 2, 3, 4, 5, 6]
        assert packed.inputs["position_ids"][0, :6].tolist() == [0, 1, 2, 0, 0, 1]
        assert packed.cu_seqlens.tolist()[:4] == [0, 3, 4, 6]
        back = packed.unpack(packed.inputs["input_ids"])
        assert back.is_nested and [row.tolist() for row in back.unbind()] == [row.tolist() for row in rows]
    labels = [torch.tensor(row) for row in ([-100, 2, 3], [4], [5, -100])]
    assert count_loss_tokens(torch.nested.nested_tensor(labels, layout=torch.jagged)).tolist() == [2, 0, 0]
    other = torch.nested.nested_tensor([*rows[1:], rows[0]], layout=torch.jagged)
    with pytest.raises(ValueError, match="'input_ids' and 'other' are nested tensors of different lengths"):
        pack_rows({"input_ids": ids, "other": other})
    gaps = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([2, 3]))
    heads = torch.nested.nested_tensor_from_jagged(torch.ones(2, 6), torch.tensor([0, 2, 6]), jagged_dim=2)
    for wrong in (torch.nested.nested_tensor(rows, layout=torch.strided), gaps, heads):
        with pytest.raises(
            ValueError, match="'input_ids' is a nested tensor of layout .*; it must be of layout torch.ja"
        ):
            pack_rows({"input_ids": wrong})


def test_nested_tensors_whose_values_are_not_their_tokens():
    for offsets in ([0, 2, 6], [3, 5, 9], [2, 4, 8]):
        outside = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor(offsets))
        with pytest.raises(ValueError, match="'ids' is a nested tensor .* and no values between or around the rows"):
            pack_rows({"ids": outside})
        # Selecting all rows leaves out what is in none of them.
        packed = pack_rows(select_rows({"ids": outside}, [0, 1]))
        assert packed.inputs["ids"].tolist() == [list(range(offsets[0], offsets[-1]))]


def test_other_fields_are_kept():
    batch = {**padded([2, 3]), "names": ["a", "b"], "settings": ("x",)}
    packed = pack_rows(batch)
    assert pack_rows({**batch, "position_ids": torch.arange(3).unsqueeze(0)}).inputs["position_ids"].shape == (1, 5)
    with_hole = {"attention_mask": torch.tensor([[1, 1, 0, 1]]), "position_ids": torch.arange(4).unsqueeze(0)}
    assert pack_rows({**padded([4]), **with_hole}).inputs["position_ids"].tolist() == [
        [0, 1, 2]
    ]  # as between a prompt and its response
    assert packed.inputs["names"] == ["a", "b"] and packed.inputs["settings"] == ("x",)
    assert batch["labels"][0, 0] == 0  # the batch itself is not written to


PIXELS = torch.nested.nested_tensor([torch.ones(5)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, {}, "the batch has the fields input_ids; attention_mask .rows, width."),
        ({"attention_mask": torch.ones(3)}, {}, r"attention_mask has shape \(3,\); it must be \(rows, width\)"),
        ({"attention_mask": torch.zeros(2, 3)}, {}, "the batch has no token"),
        (
            {**padded([2]), "input_ids": torch.zeros(1, 3)},
            {},
            r"input_ids has shape \(1, 3\), attention_mask has shape",
        ),
        ({**padded([2]), "input_ids": [[5, 6]]}, {}, r"input_ids is a list, attention_mask has shape \(1, 2\); every"),
        ({**padded([2]), "image": PIXELS}, {}, r"input_ids has shape \(1, 2\), other fields are nested tensors; every"),
        (
            {**padded([2, 3]), "position_ids": torch.zeros(2, 3, 3)},  # three positions per token, as of images
            {},
            r"position_ids have shape \(2, 3, 3\); .*: pass other positions under another name",
        ),
        (
            {**padded([2, 4]), "position_ids": torch.tensor([[0, 1, 0, 0], [0, 1, 0, 1]])},  # the row holds two
            {},
            "position_ids do not count up by 1 in row 1; .*: make every sequence a row",
        ),
        (padded([2]), {"mask": "full"}, "mask is 'full'; it must be 'block_diagonal', 'causal' or None"),
        (padded([2]), {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0; it must be an integer of at least 1"),
    ],
)
def test_mistakes(batch, options, message):
    with pytest.raises(ValueError, match=message):
        pack_rows(batch, **options)


@pytest.mark.parametrize("rows", [[[5, 6], [7, 0]], np.ones((2, 2)), None])
def test_rows_that_are_no_tensors(rows):
    """As a tokenizer returns them without return_tensors="pt"."""
    for call in (
        lambda: pack_rows({"input_ids": rows, "attention_mask": rows}),
        lambda: count_loss_tokens(rows),
        lambda: count_loss_tokens(torch.ones(2, 2), [[1, 1], [1, 0]]),
    ):
        with pytest.raises(TypeError, match=r"(attention_mask|labels) is a.*; it must be a tensor .*: convert it"):
            call()
    with pytest.raises(TypeError, match="the batch is a.*; it must be a dict or TensorDict of tensors"):
        pack_rows(rows)


def test_outputs_are_unpacked_after_the_caller_has_changed_the_inputs():
    """As the error for several positions per token advises: (3, 1, T), as of images, in place of position_ids."""
    packed = pack_rows({**padded([2, 3]), "positions": torch.zeros(2, 3, 3)}, pad_to_multiple_of=4)
    for positions in (packed.inputs.pop("positions").permute(2, 0, 1), None):
        packed.inputs["position_ids"] = positions
        assert packed.unpack(torch.arange(8).view(1, 8)).tolist() == [[0, 1, 0], [2, 3, 4]]


def test_outputs_and_labels_of_another_shape():
    packed = pack_rows(padded([2, 3]))
    with pytest.raises(ValueError, match=r"values have shape \(1, 4\), the packed row has shape \(1, 5\)"):
        packed.unpack(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"labels have shape \(2, 3\), attention_mask has shape \(2, 4\)"):
        count_loss_tokens(torch.zeros(2, 3), torch.ones(2, 4))
    for mask in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=f"labels have dtype {mask.dtype}; labels are token ids, and -100"):
            count_loss_tokens(mask)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 12),
    algorithm=st.sampled_from(["ffd", "kk", "refined"]),
    number=st.integers(1, 4),
    by_mean=st.booleans(),
)
def test_accumulated_gradients_are_those_of_the_whole_batch(example, seed, rows, algorithm, number, by_mean):
    torch.manual_seed(seed)
    model = example.CausalLM(longest=24, hidden=8, heads=2, layers=1).double()
    batch = example.draw_batch(rows, longest=24, seed=seed)
    if seed % 2:  # the first token has a label, too, which nothing predicts
        batch["labels"] = torch.where(batch["attention_mask"] != 0, batch["input_ids"], -100)
    batch["labels"][seed % rows] = -100  # a row without a term
    expected, _ = example.whole_batch(model, batch)

    spec = MicroBatchSpec(n_mbs=min(number, rows), max_tokens_per_mb=48, packing_algorithm=algorithm)
    terms = count_loss_tokens(batch["labels"])
    micro_batches = pack_micro_batches(batch, spec, batch["attention_mask"].sum(1), loss_tokens=terms)
    for number, micro_batch in enumerate(micro_batches):
        total = model(**pack_rows(micro_batch, mask="causal", pad_to_multiple_of=8).inputs)
        if by_mean:
            mean = total / max(1, micro_batches.loss_tokens[number])
            (micro_batches.loss_weights[number] * mean).backward()
        else:
            (micro_batches.loss_scale * total).backward()
    reached = example.gradients(model)
    assert float((reached - expected).abs().max()) <= 1e-13
    assert int(terms.sum()) == 0 or float(expected.abs().max()) > 1e-4


def test_the_example_runs(example, monkeypatch, capsys):
    flags = "--rows 12 --longest 64 --micro-batches.max-tokens-per-mb 256 --micro-batches.packing-algorithm kk"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *flags.split()])
    example.main()
    shown = capsys.readouterr().out
    assert "none of them padding" in shown and "largest difference of gradients" in shown
