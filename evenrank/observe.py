"""`python -m evenrank.observe script.py …`; see `commons.cli.observe`."""

import sys

from commons.cli.observe import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
