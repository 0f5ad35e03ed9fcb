"""A resume reads as little late in an epoch as early: no batch is read or passed over again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.kills import train

EARLY = 10
LATE = 10_000
READ_MAX = 10  # the first new batch, and those that the loader reads ahead


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_a_late_resume_reads_nothing_again(framework: str, tmp_path: Path) -> None:
    read = dict[int, int]()
    for batch in (EARLY, LATE):
        env = {"FRAMEWORK": framework, "EVERY": str(batch)}
        found = train("resume_time", tmp_path / str(batch), (batch + 3,), env)
        assert [one["step"] for one in found.recoveries] == [0, batch]
        read[batch] = found.steps[batch + 1]
    assert 0 < read[LATE] == read[EARLY] <= READ_MAX
