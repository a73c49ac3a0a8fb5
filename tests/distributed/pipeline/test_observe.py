"""`python -m evenrank.observe` on two ranks: the same training, every row on record, and a report that adds up."""

from __future__ import annotations

import re

import numpy as np
import pytest

from commons.cli.observe import main
from examples.torchrec_dlrm import ROWS, draw_batches
from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program

SCRIPT, STEPS = "tests/helpers/pipelines/plain_torchrec.py", 9
MODULE = "tests.helpers.pipelines.plain_torchrec"


def run(*arguments):
    """What two ranks print."""
    done = run_program(*TWO_RANKS, *arguments, timeout=240, env={"PYTHONPATH": str(ROOT), "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(shown):
    return re.findall(r"epoch \d loss [\d.]+", shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "epochs", "script"),
    [("TrainPipelineBase", 1, [SCRIPT]), ("TrainPipelineSparseDist", 2, ["-m", MODULE])],
)
def test_a_script_trains_as_before_and_its_rows_are_on_record(tmp_path, capsys, pipeline, epochs, script):
    """TorchRec's base pipeline ends with its first iterator."""
    plain = run(SCRIPT, pipeline, str(STEPS))
    shown = run("-m", "evenrank.observe", "--folder", str(tmp_path), *script, pipeline, str(STEPS))
    assert losses(shown) == losses(plain) and len(losses(plain)) == epochs * STEPS
    lengths = [[batch.sparse_features.lengths().tolist() for batch in draw_batches(rank)][:STEPS] for rank in (0, 1)]
    for rank in (0, 1):
        with np.load(tmp_path / f"rank{rank}.npz", allow_pickle=False) as record:
            assert record["lengths"].reshape(-1, ROWS).tolist() == lengths[rank] * epochs  # not those of evaluation
            assert record["rows"].tolist() == [ROWS] * STEPS * epochs
            unknown = np.flatnonzero(np.isnan(record["seconds"])).tolist()
            assert unknown == [0, STEPS][:epochs] and (record["seconds"][1:STEPS] > 0).all()
    loads = np.array(lengths).sum(axis=2)
    as_loaded = float(re.search(r"as loaded\s+([\d.]+)", shown).group(1))
    assert as_loaded == pytest.approx((loads.max(axis=0) / loads.mean(axis=0)).mean(), abs=6e-4)
    assert re.search(r"refined\s+1\.\d+", shown) and "window of 4" in shown and "constant cost" in shown

    report = ["--folder", str(tmp_path), "--report", "--task", "transformer"]
    assert main(report) == 0 and f"{epochs * STEPS} steps of 2 ranks" in capsys.readouterr().out
    (tmp_path / "rank1.npz").unlink()
    assert main(report) == 2 and "ranks [1] of 2 have written no record to" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_evenrank_balances_already_is_told_so(tmp_path):
    """Its rows are recorded as they were loaded, and its steps take the times of balanced ones."""
    shown = run("-m", "evenrank.observe", "--folder", str(tmp_path), "examples/torchrec_dlrm.py")
    changed = [before != after for before, after in re.findall(r"imbalance ([\d.]+%) → ([\d.]+%)", shown)]
    with np.load(tmp_path / "rank0.npz", allow_pickle=False) as record:
        assert record["balanced"] == sum(changed) == 10
    assert "evenrank has balanced 10 of these steps already: rows are as they were loaded" in " ".join(shown.split())
    assert "Uneven ranks cost" not in shown and "steps have times" not in shown
