"""DTensors as parts of a state: where a rank's part lies, and how often torch is asked for that."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from everstep.state.training_state import State
from everstep.state.values.tensors import LocalShard, local_box, shard_entry
from tests.support.ranks.sharding import as_rank, build


def test_a_part_of_a_mesh_has_the_ranks_of_the_rank_that_looks() -> None:
    """Equal meshes, of which each rank sees its own row."""
    seen, kept = {}, []
    for rank in (0, 2, 0):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
            kept.append(mesh)  # so that they are known at the same time
            tensor = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], run_check=False)
            part = LocalShard.of(tensor)
            seen[rank] = shard_entry("w", tensor, part).placement
            assert part.box == local_box(tensor)
    assert kept[0] == kept[1], "this test cannot fail"
    assert seen == {0: "shard(0)@2:0-1", 2: "shard(0)@2:2-3"}


def test_torch_is_asked_once_for_the_ranks_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works them out anew each time, which took longer than the rest of a survey."""
    looks: list[DeviceMesh] = []
    found = DeviceMesh.mesh.fget  # type: ignore[attr-defined]

    def look(mesh: DeviceMesh) -> torch.Tensor:
        looks.append(mesh)
        ranks: torch.Tensor = found(mesh)
        return ranks

    with as_rank(1, 4) as info:
        state = State(build("fsdp", info, 1), ranks=info)
        monkeypatch.setattr(DeviceMesh, "mesh", property(look))
        tensors = len(state.survey().tensors)
        state.survey()
    assert tensors > 4, "this test cannot fail"
    assert len(looks) <= 1
