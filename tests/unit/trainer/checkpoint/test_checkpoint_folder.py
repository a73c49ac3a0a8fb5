"""A folder of checkpoints: what is whole, what is kept, and whose it is; and the random states in it."""

import hashlib
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from commons.trainer.checkpoint.folder import (
    checkpoint_path,
    claim,
    complete_checkpoint,
    digests_of,
    holds_checkpoint,
    latest_whole,
    list_checkpoints,
    make_empty,
    read_state,
    state_text,
    unfinished_path,
)
from commons.trainer.checkpoint.random_state import kept_random_state, random_state, set_random_state


def save(folder, step, keep=9, damaged=None):
    final = checkpoint_path(folder, step)
    unfinished = unfinished_path(final)
    make_empty(unfinished)
    dcp.save({"x": torch.arange(step)}, checkpoint_id=unfinished, no_dist=True)
    digests = digests_of(unfinished, rank=0, ranks=1)
    complete_checkpoint(unfinished, final, {"progress": {"step": step}, "digests": digests}, keep, damaged)
    return final


def damage(path):
    next(path.glob("*.distcp")).unlink()


def steps(folder):
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]


def test_the_last_ones_are_kept(tmp_path):
    for step in (2, 10, 4):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [2, 4, 10]  # 10 is of a later step than the one that was saved last
    assert read_state(save(tmp_path, 12, keep=2))["progress"] == {"step": 12}
    assert steps(tmp_path) == [10, 12]
    assert holds_checkpoint(tmp_path) and holds_checkpoint(checkpoint_path(tmp_path, 12))


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    for step in (2, 4, 5):
        save(tmp_path, step)
    damage(checkpoint_path(tmp_path, 5))
    damaged = []
    latest_whole(tmp_path, damaged)
    save(tmp_path, 6, keep=2, damaged=damaged)
    assert steps(tmp_path) == [4, 5, 6]  # two whole ones
    save(tmp_path, 5, keep=2, damaged=damaged)  # written again: it counts
    assert steps(tmp_path) == [4, 5, 6] and not damaged
    save(tmp_path, 8, keep=2, damaged=damaged)
    assert steps(tmp_path) == [6, 8]


def test_a_damaged_one_of_a_later_step_replaces_no_new_one(tmp_path):
    for step in (2, 6):
        save(tmp_path, step)
    damage(checkpoint_path(tmp_path, 6))
    claim(tmp_path, 2)
    save(tmp_path, 4, keep=1)
    assert latest_whole(tmp_path, []) == checkpoint_path(tmp_path, 4)
    save(tmp_path, 6, keep=1)
    assert steps(tmp_path) == [6] and latest_whole(tmp_path, []) == checkpoint_path(tmp_path, 6)


def test_a_folder_belongs_to_one_run(tmp_path):
    folder = tmp_path / "new" / "folder"
    (folder / claim(folder, 0)).unlink()  # the marker for the other ranks
    assert list(folder.iterdir()) == []
    save(folder, 2)
    save(folder, 4)
    claim(folder, 4)
    with pytest.raises(ValueError, match=r"contains step_00000004, and this run starts after step 2; .*ckpt-load-dir"):
        claim(folder, 2)
    with pytest.raises(ValueError, match=r"and this run starts from the beginning; "):
        claim(folder, 0)
    assert len(list(folder.glob(".shared-*"))) == 1  # of the run that may start
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file", "File exists"), (Path("/proc"), "No such file")):  # a folder, but read-only
        with pytest.raises(ValueError, match=rf"{place} cannot be written \({why}.*\); .*: choose another folder"):
            claim(place, 0)


def test_an_unfinished_checkpoint_of_an_ended_run_is_removed(tmp_path):
    save(tmp_path, 4)
    for name in ("step_00000003.tmp", "step_00000005.tmp", "step_00000007.tmp", "step_mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__9_0.distcp").touch()
    (tmp_path / claim(tmp_path, 4)).unlink()
    assert (tmp_path / "step_00000007.tmp").exists()  # the run that writes it may not have ended
    assert "__9_0.distcp" not in read_state(save(tmp_path, 5))["digests"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005", "step_mine.tmp"]


def test_a_file_that_another_rank_wrote_elsewhere(tmp_path):
    final = checkpoint_path(tmp_path, 3)
    make_empty(unfinished_path(final))
    dcp.save({"x": torch.arange(3)}, checkpoint_id=unfinished_path(final), no_dist=True)
    next(unfinished_path(final).glob("*.distcp")).unlink()
    with pytest.raises(OSError, match=r"__0_0\.distcp .* is not on rank 0's disk; all ranks write to one folder"):
        complete_checkpoint(unfinished_path(final), final, {}, 3)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("use", [lambda folder: latest_whole(folder, []), lambda folder: claim(folder, 1)])
def test_a_checkpoint_of_another_version_is_refused(tmp_path, use):
    """It was passed over like a damaged one, and the run from the checkpoint before it overwrote it."""
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "state.json").write_text(state_text(read_state(path) | {"version": 2}))
    with pytest.raises(ValueError, match="step_00000002 has version 2; this evenrank reads version 1: load it with "):
        use(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"digests": ', '"digestS": '), ('"version": ', '"versioN": '), ("}", ""), ('"step": 4', '"step": 5')],
)
def test_a_damaged_state_file(tmp_path, old, new, caplog):
    first, second = save(tmp_path, 2), save(tmp_path, 4)
    state = second / "state.json"
    state.write_text(state.read_text().replace(old, new))
    damaged = []
    with caplog.at_level(logging.WARNING):
        assert latest_whole(tmp_path, damaged) == first
        assert latest_whole(tmp_path, damaged) == first
    assert damaged == [second] and caplog.text.count("step_00000004 is damaged (state.json") == 1
    claim(tmp_path, 2, damaged)


def test_digests_are_those_of_the_files(tmp_path):
    path = save(tmp_path, 3)
    state = read_state(path)
    assert state["digests"].keys() == {file.name for file in path.iterdir()} - {"state.json"}
    for name, digest in state["digests"].items():
        assert digest == hashlib.blake2b((path / name).read_bytes(), digest_size=32).hexdigest()
    for rank in (1, 2):
        (path / f"__{rank}_0.distcp").touch()
    shares = [digests_of(path, rank=rank, ranks=2).keys() for rank in range(2)]
    assert shares[0] == {file.name for file in path.iterdir()} - shares[1] and shares[1] == {"__1_0.distcp"}
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 12289)  # three blocks and a bit
    assert digests_of(tmp_path, ["large"], rank=0, ranks=1) == {
        "large": hashlib.blake2b(large.read_bytes(), digest_size=32).hexdigest()
    }


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name, problem in (("", "has no checkpoint"), ("file", "is a file"), ("nowhere", "does not exist")):
        with pytest.raises(FileNotFoundError, match=f"{problem}; .*: correct the path"):
            latest_whole(tmp_path / name, [])


def draw():
    """Gaussians too: both Mersenne twisters keep the second of a pair for the next call."""
    gaussians = [random.gauss(0, 1), float(np.random.standard_normal())]
    return [*gaussians, random.random(), float(np.random.random()), *torch.randn(3).tolist()]


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_a_state_is_set_again(drawn_before):
    for _ in range(drawn_before):
        draw()
    state = random_state()
    expected = [draw(), draw()]
    set_random_state(state)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])  # random states are on the host with any default device
def test_draws_inside_change_nothing(device):
    torch.manual_seed(5)
    expected = random_state()
    with pytest.raises(ValueError), torch.device(device), kept_random_state():
        with torch.device("cpu"):
            draw()
        raise ValueError
    assert all(torch.equal(value, expected[name]) for name, value in random_state().items())
