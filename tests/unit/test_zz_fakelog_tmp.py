import threading, random
from pathlib import Path
import pytest, everstep
from tests.unit.test_cuda_lane import World, played, restored, CudaLane, CudaTransfer
from tests.unit.world import opened
DENSE = everstep.Method(base="lazy", log="dense")

@pytest.mark.parametrize("gate", [True, False])
def test_log(gate, played, run_folder, monkeypatch):
    if not gate:
        monkeypatch.setattr(CudaTransfer, "gate", lambda *_: True)
    world, snaps = World(), {}
    with opened(run_folder, world.state, method=DENSE, keep=100) as ckpt:
        for step in range(1, 6):
            world.train()
            ckpt.step()
            snaps[step] = world.snapshot()
            if step == 1:
                ckpt.save()
            world.optimizer.zero_grad(set_to_none=False)
        print(ckpt._lane._lane)
        played.set()
        ckpt.wait()
        print(ckpt.stats())
        found = {}
        for step in (5,):
            ckpt.rewind(step) if hasattr(ckpt, "rewind") else None
