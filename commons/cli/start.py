"""The console script `evenrank`: it imports nothing else until it has chosen what Ctrl-C does."""

from __future__ import annotations

import signal


def main() -> int:
    """Run `commons.cli.main`. While modules are imported, and at exit, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a script's background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from commons.cli.main import main as run

    return run()
