"""Keepers that do not respond, or have reached a limit, are named at a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.errors import (
    KeeperTimeoutError,
)
from everstep.link.registry import keeper_files
from everstep.link.spawn import SpawnOptions
from everstep.options import KeeperOptions
from everstep.seams import SystemClock
from everstep.trainer.attach.attach import attach
from tests.support.fakekeeper import running, started


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_lives_and_does_not_answer_is_named(
    gone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped, say, as its training process was killed; or its socket was removed. Another one that
    is started finds the key taken, and ends."""
    monkeypatch.setattr("everstep.trainer.attach.attach._START_S", 0.1)
    monkeypatch.setattr("everstep.trainer.attach.attach.spawn_keeper", lambda _: None)
    options = SpawnOptions(str(tmp_path), "id", 3, detach=False)
    about: Any = (tmp_path, "id", 3, 4096, KeeperOptions(), None, SystemClock())
    with started(options), running(options, deaf=True) as keeper:
        if gone:
            Path(keeper_files(options.key).socket).unlink()
        with pytest.raises(KeeperTimeoutError) as caught:
            attach(*about, timeout_s=0.1)
        told, hint = caught.value, str(caught.value.hint)
        assert f"process {keeper.pid}) does not respond" in told.message
        assert (told.path, told.rank) == (str(tmp_path), 3)
        assert "steps after the newest base" in hint
        assert "everstep stop --now ends it, and these steps are lost" in hint
        assert (f"kill -CONT {keeper.pid}" in hint) == (not gone)
        assert ("its socket is missing" in hint) == gone


def test_one_that_never_came_is_nobody_to_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("everstep.trainer.attach.attach._START_S", 0.1)
    monkeypatch.setattr("everstep.trainer.attach.attach.spawn_keeper", lambda _: None)
    about: Any = (tmp_path, "id", 3, 4096, KeeperOptions(), None, SystemClock())
    with pytest.raises(KeeperTimeoutError, match="no keeper has answered") as caught:
        attach(*about, timeout_s=0.1)
    assert "does not respond" not in caught.value.message
