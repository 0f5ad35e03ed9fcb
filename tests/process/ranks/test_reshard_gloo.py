"""Real jobs over gloo: what some ranks have trained and saved, others restore."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainers import finish_trainer, start_trainer

TIMEOUT_S = 120.0

# Arguments: folder, rank, world, what to do. Each process of a job does the same in turn.
SCRIPT = """
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed

from everstep.format.records import Marker
from everstep.format.writer import ChunkRing
from everstep.state.training_state import State
from everstep.state.ranks.writers import RankInfo
from tests.support.ranks import sharding

folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = f"file://{folder}/store-{'-'.join(sys.argv[3:])}"
distributed.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
)
ring, info = ChunkRing(4, 2), RankInfo(rank, world)


def full(values):
    found = {}
    for name, tensor in sharding.tensors_of(values).items():
        # Their own: each rank has computed its own, or has state of its own parameters only.
        if "seen" not in name:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = whole.detach().clone()
    return found


def train(values):
    for number in range(2):
        batch = torch.arange(20.0).reshape(4, 5).sin() + number
        values["model"](batch).square().sum().backward()
        values["optimizer"].step()
        values["optimizer"].zero_grad()


for action in sys.argv[4:]:
    verb, layout = action.split(":")
    values = sharding.build(layout, info, 3 if verb == "save" else 9, stepped=verb == "save")
    if verb == "save":
        train(values)
        sharding.write(folder / "run", State(values, ranks=info), ring)
        want = full(values)
        part = f"want-{rank}" if layout == "zero" else "want-0"
        if layout == "zero" or rank == 0:
            save_file(want, folder / f"{part}.safetensors")
    else:
        markers = sorted((folder / "run").rglob("rank-*.done"))
        markers = [Marker.decode(path.read_bytes(), path) for path in markers]
        sharding.load(sharding.found(folder / "run", markers), State(values, ranks=info), ring)
        want = {}
        for path in sorted(folder.glob("want-*.safetensors")):
            want |= load_file(path)
        got = full(values)
        wrong = [name for name, tensor in got.items() if not torch.equal(tensor, want[name])]
        assert not wrong, wrong
        assert layout == "zero" or got.keys() == want.keys(), got.keys() ^ want.keys()
        train(values)  # goes on
    distributed.barrier()
print("done")
distributed.destroy_process_group()
ring.close()
"""


def job(folder: Path, world: int, *actions: str) -> None:
    """Runs a job of ``world`` processes to its end."""
    processes = [
        start_trainer(SCRIPT, str(folder), str(rank), str(world), *actions) for rank in range(world)
    ]
    ended = [finish_trainer(process, TIMEOUT_S) for process in processes]
    assert [(code, out.strip()) for code, out, _ in ended] == [(0, "done")] * world, ended


def test_two_processes_save_as_fsdp_and_load_as_tensor_parallel(tmp_path: Path) -> None:
    job(tmp_path, 2, "save:fsdp", "load:tp", "load:zero")


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "world"),
    [(layout, world) for layout in ("fsdp", "tp", "zero", "ddp") for world in (2, 4)]
    + [("fsdp_tp", 4)],
)
def test_a_job_of_another_size_loads_what_a_job_has_saved(
    layout: str, world: int, other: int, tmp_path: Path
) -> None:
    job(tmp_path, world, f"save:{layout}")
    as_it_was = layout if layout != "fsdp_tp" or other == 4 else "ddp"
    other_ways = ["one"] if other == 1 else ["fsdp", "zero"]
    job(tmp_path, other, *(f"load:{each}" for each in (*other_ways, as_it_was)))
