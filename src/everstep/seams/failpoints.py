"""Named places in the protocol at which a test can make the process fail (after etcd's gofail).

Armed from outside with ``EVERSTEP_FAILPOINTS="name=action[:hit][;name=action...]"``, read once at
import, or from inside with :func:`arm`. Actions: ``kill`` (SIGKILL to this process), ``raise``
(:class:`FailpointError`). ``hit`` is the visit, counted from 1, at which the action happens
(default 1). An unarmed failpoint costs one lookup in an empty dict.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

FAILPOINTS: dict[str, str] = {
    "save.before_write": "a base was requested; nothing of it is on disk",
    "save.before_header": "the body of a shard is written, its header is not",
    "save.before_rename": "a shard is complete and synced under its temporary name",
    "save.before_marker": "the shards have their names, this rank's marker is not written",
    "save.before_manifest": "all markers are durable, the manifest is not written",
    "save.after_manifest": "the base is committed, retention has not run",
    "retain.after_condemn": "retention has condemned a base but deleted no data file",
    "retain.before_unlink": "retention is about to delete (or park) a data file",
    "retain.before_segment": "retention is about to delete a segment of the log",
    "capture.before_mark": "trainer: a capture has its memory, nothing is copied",
    "capture.before_captured": "trainer: all tensors are in the arena, the keeper is not notified",
    "capture.after_captured": "trainer: the keeper was notified that a capture is complete",
    "keeper.after_begin": "keeper: a capture is announced, writing has not begun",
    "keeper.before_persist": "keeper: a capture is about to be written",
    "keeper.after_captured": "keeper: a capture is complete, and not yet registered",
    "log.before_record": "trainer: a record is in the arena, the keeper is not notified",
    "log.after_record": "trainer: the keeper was notified of a record",
    "keeper.log_arrived": "keeper: a record has arrived, and is not yet registered",
    "replica.before_apply": "keeper: its replica is about to apply complete steps",
    "replica.after_apply": "keeper: its replica has applied them",
    "replica.before_persist": "keeper: a base of its replica is about to be written",
    "window.after_part": "trainer: copies of a part of a multi-step base have begun",
    "window.before_assemble": "trainer: all parts and updates exist, the keeper is not notified",
    "window.after_assemble": "trainer: the keeper was notified that all parts are there",
    "rebuild.before": "keeper: a base is about to be completed from its parts",
    "rebuild.after": "keeper: a base is complete, and not yet registered",
    "log.before_rename": "a segment is complete and synced under its temporary name",
    "log.before_marker": "a segment has its name, its marker is not written",
    "log_copy.before_marker": "a segment's file is in another tier, its marker is not",
    "copy.before_marker": "several ranks: a rank's files are in a tier, its marker is not",
    "copy.before_manifest": "several ranks: all markers are in a tier, the manifest is not",
    "resume.before_timeline": "the state is loaded, the new timeline is not open",
}
"""Every failpoint with the state of the protocol there; a test visits each of them."""

_armed: dict[str, tuple[Callable[[str], None], int]] = {}
_hits: dict[str, int] = {}
_lock = threading.Lock()


class FailpointError(Exception):
    """Raised by a failpoint armed with ``raise``."""


def failpoint(name: str) -> None:
    """Run the armed action of ``name`` if this is the visit it waits for."""
    if not _armed:
        return
    with _lock:
        armed = _armed.get(name)
        if armed is None:
            return
        _hits[name] = _hits.get(name, 0) + 1
        if _hits[name] != armed[1]:
            return
    # Outside of the lock: the action may raise, or arm other failpoints.
    armed[0](name)


def arm(name: str, action: str | Callable[[str], None], hit: int = 1) -> None:
    """Arm ``name``: at its ``hit``-th visit from now ``action`` runs.

    Raises:
        ValueError: unknown name or action.
    """
    if name not in FAILPOINTS:
        raise ValueError(f"no failpoint {name!r}; there are: {', '.join(sorted(FAILPOINTS))}")
    if isinstance(action, str):
        if action not in _ACTIONS:
            raise ValueError(f"no failpoint action {action!r}; there are: {', '.join(_ACTIONS)}")
        action = _ACTIONS[action]
    with _lock:
        _armed[name] = (action, hit)
        _hits.pop(name, None)


def disarm_all() -> None:
    """Disarm every failpoint and reset the visit counts."""
    with _lock:
        _armed.clear()
        _hits.clear()


def _kill(name: str) -> None:
    # SIGKILL, as no handler, finally block or atexit function may run.
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(name: str) -> None:
    raise FailpointError(name)


_ACTIONS: dict[str, Callable[[str], None]] = {"kill": _kill, "raise": _raise}


def arm_from_environment(text: str) -> None:
    """Arm the failpoints that the value of ``EVERSTEP_FAILPOINTS`` lists."""
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, _, rest = part.partition("=")
        action, _, hit = rest.partition(":")
        arm(name.strip(), action.strip(), int(hit) if hit else 1)


arm_from_environment(os.environ.get("EVERSTEP_FAILPOINTS", ""))
