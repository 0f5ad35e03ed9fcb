"""``python -m everstep.restore.offline.audit_process``: one audit, in a process of its own.

The keeper starts it at the lowest priority and reads the record of the audit from its standard
output; if there is none, the reason is on standard error. It writes nothing to the run folder. It
is a separate process because replay needs torch, which the keeper does not load, and because it can
be killed at any instruction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import PurePath

from everstep.seams.processes.processes import yield_resources
from everstep.seams.progress import print_line


def main(arguments: Sequence[str]) -> int:
    """Audit the newest base that has no audit yet; return the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument(
        "--timeline", required=True, type=int, help="timeline whose history is audited"
    )
    parser.add_argument("--parent", required=True, type=int, help="exit when this process exits")
    options = parser.parse_args(list(arguments))
    yield_resources(options.parent)

    # Imported after the priority was lowered: loading torch takes seconds of CPU time.
    from everstep.errors import EverstepError
    from everstep.restore.offline.audit import audit_newest
    from everstep.seams import PosixFileSystem, SystemClock

    try:
        found = audit_newest(
            PosixFileSystem(), PurePath(options.run), options.timeline, SystemClock()
        )
    except (EverstepError, OSError) as error:
        found = str(error)
    # The exit status is 0 in both cases: the keeper logs any other one as an error.
    if isinstance(found, str):
        print_line(found)
    else:
        sys.stdout.buffer.write(found.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
