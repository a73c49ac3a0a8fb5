"""The order of the exchanges: a rank that skips one must not take part in the next one while others are in the former.

The payload has no step number: with the rows of another step, gloo ends the process or fills the batch with them.
"""

from __future__ import annotations

import numpy as np

from commons.distributed.channel.agree import ControlChannel


class ExchangeOrder:
    """The exchanges that are planned and not carried out, over one group; equal on all ranks that make the same calls.

    Usually there is none before the one that begins. If there is one, because all ranks have dropped a shuffle or this
    rank alone has skipped it, ranks compare the steps of their next exchange.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._planned: set[int] = set()

    def plan(self, step: int) -> None:
        """Expect an exchange; called on the worker thread, before the shuffle can be finished."""
        self._planned.add(step)

    def begin(self, step: int) -> None:
        """Take part in an exchange; called on the main thread.

        Raises:
            ValueError: ranks are at the exchanges of different steps.
            RankMissingError: another rank waits in an exchange that this rank has skipped.
        """
        self._planned.discard(step)
        skipped = sorted(each for each in self._planned.copy() if each < step)
        if not skipped:
            return
        steps = self._channel.gather(np.array([step]), step, f"exchange (step {skipped[0]} was skipped)", on_main=True)
        if (steps != step).any():
            raise ValueError(
                f"ranks finish the shuffles of steps {steps[:, 0].tolist()} ({self._channel.description}); every rank "
                "must finish the same shuffles in the same order: finish each shuffle that was started"
            )
        self._planned.difference_update(skipped)
