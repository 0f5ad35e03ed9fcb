"""Step marks in flight, with real processes: killed at any record, so many steps more are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keeper_process import finish, keepers_gone, start

TRAIN = """
os.environ.pop("EVERSTEP_FAILPOINTS", None)
log = everstep.LogOptions(in_flight_steps=2)
ckpt = everstep.Checkpointer(run, state, method="logged", every=4, log=log)
recovery = ckpt.resume()
say(step=recovery.step, exact=recovery.exact, digest=digest())
for step in range(recovery.step + 1, 13):
    train_step()
    ckpt.step()
    say(at=step, digest=digest())
ckpt.close()
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digest of the state after each step."""
    status, said, err = finish(start(tmp_path_factory.mktemp("alone") / "run", TRAIN))
    assert status == 0, err
    keepers_gone()
    return {one["at"]: one["digest"] for one in said if "at" in one}


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        ("log.before_record", 14),
        *(
            pytest.param(point, hit, marks=pytest.mark.slow)
            for point in ("log.before_record", "log.after_record")
            for hit in (5, 8, 9, 13, 20)
        ),
    ],
)
def test_killed_at_a_record(
    point: str, hit: int, uninterrupted: dict[int, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    status, said, err = finish(start(run, TRAIN, EVERSTEP_FAILPOINTS=f"{point}=kill:{hit}"))
    assert status == -9, err
    done = max(one["at"] for one in said if "at" in one)
    status, said, err = finish(start(run, TRAIN))
    assert status == 0, err
    recovery = said[0]
    assert done - 2 <= recovery["step"] <= done + 1  # the mark may be there, its step not yet over
    assert recovery["exact"]
    assert recovery["digest"] == uninterrupted[recovery["step"]]
    assert said[-1]["digest"] == uninterrupted[12]
