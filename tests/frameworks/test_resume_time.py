"""A resume takes as long late in an epoch as early: no batch is read, made or passed over again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.kills import train

EARLY = 10
LATE = 10_000
STARTS = 3
MARGIN_S = 0.25


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_a_late_resume_is_not_slower(framework: str, tmp_path: Path) -> None:
    seconds = dict[int, float]()
    for batch in (EARLY, LATE):
        folder = tmp_path / str(batch)
        env = {"FRAMEWORK": framework, "EVERY": str(batch)}
        found = [train("resume_time", folder, (batch + 3,), env)]
        found += [train("resume_time", folder, (), env) for _ in range(STARTS - 1)]
        assert [one["step"] for one in found[-1].recoveries] == [0, *[batch] * STARTS]
        seconds[batch] = min(one.steps[batch + 1] for one in found)
    print({batch: f"{1000 * found:.0f} ms" for batch, found in seconds.items()})
    assert seconds[LATE] < seconds[EARLY] + MARGIN_S
