"""``python -m everstep``: the same as the command ``everstep``."""

from __future__ import annotations

import sys

from everstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
