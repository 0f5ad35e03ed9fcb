"""Digests of the live state of a training run, taken without any of everstep's own code.

The demo compares two checkpoints byte by byte. That would prove little if the code that
wrote them left something out of both; so each child also describes its live objects in
its own way, and those descriptions are compared too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.workloads import Training

_LONGEST_TEXT = 60


def fingerprint(training: Training) -> dict[str, str]:
    """Describes every tensor and number of the run, and the process's generators.

    Returns:
        By path, e.g. ``optimizer/state/3/exp_avg``: type, shape and digest of a tensor or
        array; the value itself of anything small.
    """
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "loader": training.loader.state_dict(),
        "progress": training.progress,
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": torch.get_rng_state(),
        },
    }
    return dict(_leaves("", state))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and len(value) <= _LONGEST_TEXT:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item)
    else:
        yield path, _describe(value)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):  # a DTensor: what this rank has of it
            return f"part of {list(value.shape)}: {_describe(value.to_local())}"
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(data)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    text = repr(value)
    if len(text) > _LONGEST_TEXT:
        return f"{type(value).__name__} {xxhash.xxh3_128_hexdigest(text.encode())}"
    return text
