"""``link/messages.py``: every field of a job session reaches the keeper process."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from everstep.commit.lineage import BaseId
from everstep.link.messages import JobSession

SESSION = JobSession(
    session="start-1",
    rank=1,
    disks=("a", "b"),
    peers=(("127.0.0.1", 4000), ("127.0.0.1", 4001)),
    recovered=BaseId(1, 10),
    spare=BaseId(1, 5),
    unreadable=(BaseId(1, 15),),
    again=True,
    lost=(20, 25),
    nodes=("n0", "n1"),
    unread=True,
)


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(JobSession)])
def test_a_field_survives_the_message(field: str) -> None:
    """Without ``unread`` a keeper process took a base fetched from a peer for verified on disk,
    and retention could delete the base before it."""
    default = next(one.default for one in dataclasses.fields(JobSession) if one.name == field)
    assert getattr(SESSION, field) != default, "the test needs a value of its own"
    packed = msgpack.unpackb(msgpack.packb(SESSION.to_wire()))
    assert getattr(JobSession.from_wire(packed), field) == getattr(SESSION, field)
