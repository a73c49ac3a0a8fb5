"""torchrun's agent, which hosts the store of its ranks, stands still: they go on; where they fail, they end in time.

An agent that stands still does not end the others when a rank has failed: each ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.frozen_agent import A_RANK_STOPS, A_SHUFFLER_IS_MADE
from tests.helpers.programs import ROOT, TWO_RANKS
from tests.helpers.stopped_ranks import wait_for

# Seconds from the start of torchrun to the errors, about ten where nothing else runs and far fewer than torch's store
# waits; and from there to the end of the ranks.
START_SECONDS, END_SECONDS = 180.0, 60.0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie, which nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "ranks", "place"),
    [(A_RANK_STOPS, [0], "gather of step 2"), (A_SHUFFLER_IS_MADE, [0, 1], "connection of step 0")],
    ids=[A_RANK_STOPS, A_SHUFFLER_IS_MADE],
)
def test_an_agent_that_stands_still_is_named_and_not_waited_for(tmp_path, fault, ranks, place):
    command = [*TWO_RANKS, "-m", "tests.helpers.frozen_agent", fault, str(tmp_path)]
    output = tmp_path / "output"
    with output.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as agent:
        started: list[int] = []
        try:
            told = [tmp_path / f"said{rank}" for rank in ranks]
            assert wait_for(lambda: all(each.exists() for each in told), START_SECONDS), output.read_text()
            started = _children(agent.pid)
            stopped = {int(each.read_text()) for each in tmp_path.glob("pid*")}
            assert len(started) == 2
            assert wait_for(lambda: all(map(_has_ended, set(started) - stopped)), END_SECONDS), output.read_text()
        finally:
            for pid in started or _children(agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.kill()
    for rank, each in zip(ranks, told):
        said = each.read_text()
        assert said.startswith(f"RankMissingError: the {place} failed on rank {rank} and the store does not answer; ")
        assert "torchrun's agent on the first host hosts it and has stopped or is overloaded: see there" in said
    assert "frame #" not in output.read_text()
