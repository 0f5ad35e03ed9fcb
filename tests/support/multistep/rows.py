"""Bases over several steps, by rows of the exactness matrix: made, restored, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import everstep
from everstep.seams import Seams
from tests.support.following import opened, run_steps, steps_on_disk
from tests.support.log.late import LateLane
from tests.support.matrix import CASES, LOOPS
from tests.support.matrix import World as MatrixWorld
from tests.support.serving import Bench
from tests.support.world import forget

STEPS = 12


def over(parts: int | str, *, overlap: int = 0) -> everstep.Method:
    """Gradients are held for so many steps; 0: updates wait for them."""
    about = {"overlap_forward": overlap > 0, "held_steps": max(1, overlap)}
    return everstep.Method(base="multistep", parts=parts, **about)


def restored(run: Path, world: Any, step: int | None = None) -> Any:
    """What a base gives back to another process."""
    forget(run)
    keeper = everstep.KeeperOptions(process=False)
    options: dict[str, Any] = {"method": "lazy", "every": None, "keep": 50, "keeper": keeper}
    with everstep.Checkpointer(run, world.state, **options) as ckpt:
        recovery = ckpt.resume(step)
        assert recovery.exact, recovery.evidence
        assert step in (None, recovery.step)
    return world.snapshot()


def check(
    bench: Bench,
    make: Any,
    method: everstep.Method,
    *,
    every: int = 4,
    steps: int = STEPS,
    late: bool = True,
) -> everstep.Checkpointer:
    """Trains, and compares every base that there is then with the state of its step."""
    seams = Seams(lane=LateLane) if late else None
    world = make(seed=1)
    ckpt = opened(bench.run, world, method=method, every=every, seams=seams)
    ckpt.resume()
    states = run_steps(ckpt, world, steps)
    ckpt.close()
    found = steps_on_disk(bench.run)
    assert found, "this test cannot fail"
    for step in found:
        assert restored(bench.run, make(seed=9), step) == states[step], step
    report = ckpt.stats().multistep
    assert report is not None
    assert (report.abandoned, report.deferred) == (0, 0)
    assert isinstance(method.parts, int)
    begun = range(every, steps + 1, every)
    assert found == [min(begin + method.parts - 1, steps) for begin in begun]
    return ckpt


def matrix(case: str, loop: str) -> Any:
    return lambda *, seed: MatrixWorld(CASES[case], LOOPS[loop], seed=seed)


ROWS = [
    "AdamW-for-loop",
    "AdamW-foreach",
    "AdamW-fused",
    "SGD-momentum-for-loop",
    "SGD-momentum-foreach",
    "SGD-nesterov-foreach",
]
