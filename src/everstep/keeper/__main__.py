"""Entry point of the keeper process: ``python -m everstep.keeper``, started by a trainer."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import PurePath

from everstep.link.spawn import begin

_ACQUIRE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Serve one run and rank until the keeper is no longer needed; return the exit status."""
    # Before any large import: the trainer waits until this process has detached itself.
    options = begin(arguments)

    from everstep.config.options import ANNOUNCING
    from everstep.keeper.process.server import Server
    from everstep.link.messages import PROTOCOL
    from everstep.link.registry import KeeperInfo, Registration
    from everstep.seams.clock import SystemClock
    from everstep.version import __version__

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    info = KeeperInfo(
        pid=os.getpid(),
        run=options.run,
        run_id=options.run_id,
        rank=options.rank,
        version=__version__,
        protocol=PROTOCOL,
        started_unix_s=SystemClock().unix_s(),
    )
    # Wait a little: a keeper that is about to exit holds the key until it has deleted its files.
    registration = Registration.acquire(options.key, info, timeout_s=_ACQUIRE_S)
    if registration is None:
        logging.info("another keeper already serves this run: exiting")
        return 0
    try:
        listener = registration.listen()
        server = Server(
            listener,
            PurePath(options.run),
            registration,
            version=__version__,
            linger_s=options.linger_s,
            writers=options.threads,
        )
        # Signals that announce the end of a job (preemption) reach the keeper, too: it persists
        # complete captures first, and then exits.
        for name in ANNOUNCING:
            signal.signal(signal.Signals[name], lambda *_: server.end())
        # Ctrl-C in a terminal is meant for the trainer; the keeper has to outlive it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.info("keeper of rank %d of %s", options.rank, options.run)
        server.run()
    finally:
        # Release the key on every way out, so that the next trainer need not clear a stale
        # registration.
        registration.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
