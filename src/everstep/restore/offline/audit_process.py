"""``python -m everstep.restore.offline.audit_process``: one audit, in a process of its own.

The keeper starts it, behind everything else that the machine has to do, and reads the record of
the audit from its standard output; why there is none, it says on standard error. It writes
nothing to the run folder. A process of its own, because replay needs torch, which the keeper does
without, and because it can be killed at any instruction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import PurePath

from everstep.seams.processes.children import yield_resources
from everstep.seams.stderr import print_line

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Audits the newest base that has no audit yet; returns the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--timeline", required=True, type=int, help="whose history it is about")
    parser.add_argument("--parent", required=True, type=int, help="process that it ends with")
    options = parser.parse_args(list(arguments))
    yield_resources(options.parent)

    from everstep.errors import EverstepError
    from everstep.restore.offline.audit import audit_newest
    from everstep.seams import PosixFileSystem, SystemClock

    try:
        found = audit_newest(
            PosixFileSystem(), PurePath(options.run), options.timeline, SystemClock()
        )
    except (EverstepError, OSError) as error:
        found = str(error)
    if isinstance(found, str):
        print_line(found)
    else:
        sys.stdout.buffer.write(found.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
