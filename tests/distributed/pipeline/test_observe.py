"""`python -m evenrank.observe` on two ranks: the same training, every row on record, and a report that adds up."""

from __future__ import annotations

import re

import numpy as np
import pytest

from commons.cli.observe import main
from tests.helpers.jobs.programs import ROOT, TWO_RANKS, run_program
from tests.helpers.pipelines.plain_torchrec import ROWS, lengths_of

SCRIPT, STEPS = "tests/helpers/pipelines/plain_torchrec.py", 24


def run(*arguments):
    """What two ranks print."""
    done = run_program(*TWO_RANKS, *arguments, timeout=240, env={"PYTHONPATH": str(ROOT), "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(shown):
    return re.findall(r"epoch \d loss [\d.]+", shown)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "epochs"), [("TrainPipelineBase", 1), ("TrainPipelineSparseDist", 2)])
def test_a_script_trains_as_before_and_its_rows_are_on_record(tmp_path, pipeline, epochs):
    """TorchRec's base pipeline ends with its first iterator."""
    plain = run(SCRIPT, pipeline, str(STEPS))
    observe = ["-m", "evenrank.observe", "--folder", str(tmp_path / "seen")]
    shown = run(*observe, SCRIPT, pipeline, str(STEPS))
    assert losses(shown) == losses(plain) and len(losses(plain)) == epochs * STEPS
    for rank in (0, 1):
        with np.load(tmp_path / "seen" / f"rank{rank}.npz", allow_pickle=False) as record:
            expected = [lengths_of(rank, step).tolist() for step in range(STEPS)] * epochs  # not those of evaluation
            assert record["lengths"].reshape(-1, ROWS).tolist() == expected
            assert record["rows"].tolist() == [ROWS] * STEPS * epochs
            unknown = np.flatnonzero(np.isnan(record["seconds"])).tolist()
            assert unknown == [0, STEPS][:epochs] and (record["seconds"][1:STEPS] > 0).all()
    loads = np.array([[int(lengths_of(rank, step).sum()) for rank in (0, 1)] for step in range(STEPS)])
    as_loaded = float(re.search(r"as loaded\s+([\d.]+)", shown).group(1))
    assert as_loaded == pytest.approx((loads.max(axis=1) / loads.mean(axis=1)).mean(), abs=6e-4)
    assert re.search(r"refined\s+1\.\d+", shown) and "window of 4" in shown and "constant cost" in shown


@pytest.mark.slow
def test_a_module_too_and_a_report_once_more(tmp_path, capsys):
    observe = ["-m", "evenrank.observe", "--folder", str(tmp_path / "seen"), "--window", "2"]
    run(*observe, "-m", "tests.helpers.pipelines.plain_torchrec", "TrainPipelineSparseDist", "4")
    assert main(["--folder", str(tmp_path / "seen"), "--report", "--task", "transformer"]) == 0
    shown = capsys.readouterr().out
    assert "8 steps of 2 ranks: 128 rows" in shown and "6 steps have times; 20 steps" in shown
    (tmp_path / "seen" / "rank1.npz").unlink()
    assert main(["--folder", str(tmp_path / "seen"), "--report"]) == 2
    assert "ranks [1] of 2 have written no record to" in capsys.readouterr().err
