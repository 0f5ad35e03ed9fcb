"""Logs that hold lossy copies of gradients, next to those that training would have recorded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.writer import ChunkRing
from everstep.link.recordable import Layouts
from everstep.options import LogOptions
from everstep.run.segments import read_segment
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import GRADIENT, UPDATE_OBJECT
from everstep.state.values.objects import encode
from tests.support.logged import opened, segments_of
from tests.support.world import TIMEOUT_S

HEAD = RecordHead("update", 1, 4, 7, "shape", True)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def log_of(run: Path, world: Any, log: str, steps: int = 3, **options: Any) -> list[LogRecord]:
    """The log on disk of a training with a base of step 1 and one of the last."""
    kept: dict[str, Any] = {"to": "disk", "batch_steps": 1, "history": "all", **options}
    method = everstep.Method(base="lazy", log=log)  # type: ignore[arg-type]
    with opened(run, world, method=method, log=LogOptions(**kept), every=100) as ckpt:
        ckpt.resume()
        for _ in range(steps):
            world.train()
            ckpt.step()
    ring = ChunkRing(4, 2)
    try:
        segments = segments_of(run)
        read = functools.partial(read_segment, PosixFileSystem(), timeout_s=TIMEOUT_S)
        return [record for segment in segments for record in read(segment, ring)]
    finally:
        ring.close()


def record_of(gradients: Mapping[str, torch.Tensor], *, head: RecordHead = HEAD) -> LogRecord:
    """A record of dense gradients."""
    named = {GRADIENT + name: gradient for name, gradient in gradients.items()}
    layout = Layouts().of(named)
    data = memoryview(bytearray(layout.size_bytes))
    for place in layout.placed:
        data[place.begin : place.end] = raw(named[place.entry.name])
    about = {"optimizer": "o", "kind": "torch.optim.sgd.SGD", "groups": [{"lr": 0.1}]}
    objects = {} if head.declared or head.kind == "mark" else {UPDATE_OBJECT: encode(about)}
    return LogRecord(head, layout, objects, data, record_digest(data, objects))


def large_and_small() -> LogRecord:
    generator = torch.Generator().manual_seed(3)
    named = {
        "large": torch.randn(200_003, generator=generator),
        "half": torch.randn(100_001, generator=generator).to(torch.bfloat16),
        "small": torch.randn(77_777, generator=generator),
    }
    return record_of(named)
