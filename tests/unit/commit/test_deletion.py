"""Deleting in two steps: whoever is fenced off lifts its mark again (I11, ``adr/004``)."""

from __future__ import annotations

import pytest

from everstep.commit.base_commit import (
    AlreadyDeleted,
    BaseDeletion,
    CheckFence,
    Condemn,
    Condemned,
    DeleteFiles,
    FenceSeen,
    FilesDeleted,
    Lift,
    Lifted,
)
from everstep.commit.lineage import BaseId
from everstep.errors import FencedError

BASE = BaseId(1, 10)


def test_in_order() -> None:
    deletion = BaseDeletion(BASE, 2)
    assert deletion.start() == CheckFence()
    assert deletion.on(FenceSeen(2)) == Condemn()
    assert deletion.on(Condemned()) == CheckFence()
    assert deletion.on(FenceSeen(2)) == DeleteFiles()
    assert deletion.on(FilesDeleted()) is None


def test_fenced_off_before() -> None:
    deletion = BaseDeletion(BASE, 2)
    deletion.start()
    with pytest.raises(FencedError, match="timeline 3 has taken the run over"):
        deletion.on(FenceSeen(3))


def test_fenced_off_in_between_lifts_the_mark() -> None:
    deletion = BaseDeletion(BASE, 2)
    deletion.start()
    deletion.on(FenceSeen(2))
    deletion.on(Condemned())
    assert deletion.on(FenceSeen(3)) == Lift()
    with pytest.raises(FencedError):
        deletion.on(Lifted())


@pytest.mark.parametrize("newest", [2, 3])
def test_somebody_else_was_deleting_it(newest: int) -> None:
    deletion = BaseDeletion(BASE, 2)
    deletion.start()
    deletion.on(FenceSeen(2))
    if newest == 2:
        assert deletion.on(AlreadyDeleted(newest)) is None
    else:
        with pytest.raises(FencedError):
            deletion.on(AlreadyDeleted(newest))


def test_no_timeline_fences_a_person_off() -> None:
    deletion = BaseDeletion(BASE, None)
    deletion.start()
    assert deletion.on(FenceSeen(9)) == Condemn()
    deletion.on(Condemned())
    assert deletion.on(FenceSeen(9)) == DeleteFiles()
