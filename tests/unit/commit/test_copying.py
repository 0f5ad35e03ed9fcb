"""What rank 0 knows of a base that all ranks copy to one place."""

from __future__ import annotations

from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import CopyRound


def test_a_round_ends_when_all_have_told() -> None:
    one = CopyRound(BaseId(1, 5), (1, 2), 10.0)
    assert one.tick(0.0) == (1, 2)
    one.on_reply(1, BaseId(1, 5), "")
    one.on_reply(2, BaseId(1, 4), "")
    assert one.tick(0.5) == ()
    assert one.tick(1.5) == (2,)
    one.on_reply(2, BaseId(1, 5), "no space")
    assert (one.waits_for, one.problems) == ((), {2: "no space"})


def test_a_round_names_who_is_silent_but_not_when_nobody_listened() -> None:
    one = CopyRound(BaseId(1, 5), (1, 2), 3.0)
    for now_s in (0.0, 1.0, 2.0, 3.0):
        one.tick(now_s)
        one.on_message(2)
    one.tick(4.0)
    assert one.silent == (1,)
    other = CopyRound(BaseId(1, 5), (1,), 3.0)
    other.tick(0.0)
    other.tick(100.0)
    assert other.silent == ()
