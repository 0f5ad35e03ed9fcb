"""Declared updates with real processes: killed at any record, every bit is that of a run that
was left alone, averages included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keeper_process import finish, keepers_gone, start

TRAIN = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
os.environ.pop("EVERSTEP_FAILPOINTS", None)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
state["ema"] = ema

def average():
    ema.update_parameters(model)

def digest():
    h = hashlib.sha256()
    for module in (model, ema):
        for t in module.state_dict().values():
            h.update(t.numpy().tobytes())
    for p in model.parameters():
        for t in optimizer.state.get(p, {}).values():
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

options = dict(method="logged", every=None, declared={"ema/*": average})
ckpt = everstep.Checkpointer(run, state, **options)
recovery = ckpt.resume()
say(step=recovery.step, exact=recovery.exact, replayed=recovery.replayed, digest=digest())
for step in range(recovery.step + 1, 10):
    train_step()
    if step % 3:
        ckpt.before_update()
        average()
        ckpt.after_update("ema/*")
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


@pytest.mark.slow  # simulated kills: test_declared.py
@pytest.mark.parametrize(
    ("point", "hit"),
    [
        *(("log.before_record", hit) for hit in (4, 6, 11, 13, 20)),
        *(("log.after_record", hit) for hit in (5, 7, 11, 14, 24)),
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
    assert recovery["step"] in (done, done + 1)  # the mark may be there, its step not yet over
    assert recovery["exact"], err
    assert recovery["replayed"] == recovery["step"] - 1
    assert recovery["digest"] == uninterrupted[recovery["step"]]
    assert {one["at"]: one["digest"] for one in said[1:]} == {
        step: digest for step, digest in uninterrupted.items() if step > recovery["step"]
    }
    keepers_gone()
