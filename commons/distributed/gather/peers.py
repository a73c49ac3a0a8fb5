"""PEERS: model-parallel peers compare what each of their data-parallel groups has measured and planned.

Peers train the same batches, but are in different data-parallel groups, which plan separately. So they use the same
calibration and the lowest of their speeds. Every rank of all groups takes part at the same steps, whatever fails.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import capture_error
from commons.perf_model.speed_control import LOOK_STEPS


class Peers:
    """The model-parallel peers of this rank.

    Args:
        channel: the peers.
        calibration: this rank's, as JSON values; None without one.
        unread: why this rank's calibration cannot be used, if so.

    Attributes:
        planned: the steps that this rank's group has planned since the last `settle`; the caller appends them.
        problem: a difference between the peers, or an error of one of them; it stays.
    """

    def __init__(self, channel: ControlChannel, calibration: dict[str, Any] | None, unread: Exception | None) -> None:
        self._channel, self._unread = channel, unread
        self._options = None if unread else {"calibrations": calibration}
        self.planned: deque[int] = deque(maxlen=LOOK_STEPS)
        self.problem: Exception | None = None

    def settle(self, step: int, speed: int) -> int:
        """The lowest speed of the peers, or this rank's own after a problem.

        Called at the first step, and with measured speeds every `LOOK_STEPS` steps.
        """
        if self.problem is not None:
            return speed
        lowest, self.problem = capture_error(lambda: self._settle(step, speed))
        self.planned.clear()
        return lowest or speed

    def _settle(self, step: int, speed: int) -> int:
        channel, planned = self._channel, [*self.planned, *[-1] * LOOK_STEPS][:LOOK_STEPS]
        table = channel.agree("shuffle of model-parallel peers", self._options, self._unread, [speed, *planned], step)
        other = int((table[:, 1:] != table[0, 1:]).any(axis=1).argmax())
        if other:
            first, second = ([each for each in row if each >= 0] for row in table[[0, other], 1:].tolist())
            raise RuntimeError(
                f"before step {step} rank {channel.members[0]} has planned steps {first}, and rank "
                f"{channel.members[other]} {second}; model-parallel peers train the same batches, and a step has "
                "failed, or the data have ended, in one of their data-parallel groups alone: restart from a "
                "checkpoint, with the same data on all peers"
            )
        return int(table[:, 0].min())
