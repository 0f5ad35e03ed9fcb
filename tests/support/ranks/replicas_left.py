"""Ranks with disks of their own, of which some are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.ranks.replicas import replicas, resume, train

BASES: dict[str, Any] = {"method": "lazy", "every": 2, "log": None}


def saved(paths: tuple[Path, ...], steps: int = 4) -> None:
    """A job that has a base of this step, on every disk."""
    with replicas(*paths, **BASES) as ranks:
        resume(ranks)
        train(ranks, steps)
        for one in ranks:
            one.ckpt.wait(20)


def own_models(paths: tuple[Path, ...], **options: Any) -> Any:
    """Ranks whose models have nothing in common."""
    return replicas(*paths, **{**BASES, "apart": True, **options})
