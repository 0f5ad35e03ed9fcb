"""Threads of a keeper that need torch import it one after the other."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from everstep.keeper.replica.replica import import_torch
from everstep.keeper.ship.log_copies import Shrink

failed = []
threading.excepthook = lambda args: failed.append(args.exc_value)
shrink = Shrink(0.1, 100)
threads = []
for number in range(8):
    thread = threading.Thread(target=import_torch)
    thread.start()
    threads.append(thread)
    threading.Event().wait(0.15)  # from other ends of the modules
for thread in threads:
    thread.join(60)
assert not failed, failed
assert not any(thread.is_alive() for thread in threads)
assert shrink.ready
"""


def test_threads_do_not_wait_for_each_others_modules() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
