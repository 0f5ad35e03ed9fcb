"""Writes the golden run folder of this format: `python -m tests.golden.make_golden`.

It was run once for each format and its output is kept for ever: what it wrote then must stay
readable. The state is given by formula, so that a test can tell what to expect without
asking the code that wrote it.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

FOLDER = Path(__file__).parent / "format-1"
DTYPES = ("bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32").split()
DTYPES += "float64 complex64 complex128 float8_e5m2 float8_e4m3fn float8_e5m2fnuz".split()
DTYPES += ["float8_e4m3fnuz", "float8_e8m0fnu"]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Every dtype, every shape that needs care; bytes by formula."""
    found = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        count = 6 * torch.empty(0, dtype=dtype).element_size()
        data = bytes(
            (step + 3 * number + 7 * i) % (2 if name == "bool" else 120) for i in range(count)
        )
        found[name] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(2, 3).clone()
    found["scalar"] = torch.tensor(float(step))
    found["empty"] = torch.empty(0, 3)
    found["transposed"] = (torch.arange(12.0) + step).reshape(3, 4).t()
    found["channels last"] = (
        (torch.arange(48.0) + step).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    )
    return found


def plain(step: int) -> dict[str, Any]:
    """A value of every kind of object."""
    return {
        "tensors": tensors(step),
        "none": None,
        "numbers": [True, step, -step, 2**127 + step, -(2**127), 0.1 + step, 1j * step],
        "not a number": float("nan"),
        "texts": ["", "ä/~", b"\x00\xff", bytearray(b"ab")],
        "nested": {"tuple": (1, (2, [3])), 7: "int key", (1, "a"): "tuple key", "0": 0, 0: "0"},
        "sets": {1, 2, 3},
        "frozen": frozenset({"a"}),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({30: 1, 80: 2}),
        "deque": deque([1, 2], maxlen=5),
        "range": range(1, 10, 2),
        "slice": slice(1, None, 2),
        "size": torch.Size([2, 3]),
        "numpy": [
            np.float32(step),
            np.int64(step),
            np.bool_(True),
            np.arange(4, dtype=">i2") + step,
        ],
        "torch": [torch.bfloat16, torch.device("cuda", 1), torch.channels_last, torch.strided],
    }


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(step))
        with torch.no_grad():
            self.first.weight.copy_((torch.arange(9.0) + step).reshape(3, 3))
            self.first.bias.copy_(torch.arange(3.0) - step)


def state(step: int) -> dict[str, Any]:
    """The state at a step; the optimizer has moments of its own."""
    torch.manual_seed(step)
    np.random.seed(step)
    random.seed(step)
    model = Tied(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + step)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(parameter, 10.0 * number + step),
            "exp_avg_sq": torch.full_like(parameter, 20.0 * number + step),
        }
    return {"model": model, "optimizer": optimizer, "plain": plain(step)}


def main() -> None:
    from everstep import Checkpointer

    shutil.rmtree(FOLDER, ignore_errors=True)
    for first, last in ((0, 2), (2, 4)):  # two timelines: steps 1 and 2, then 3 and 4
        live = state(first)
        with Checkpointer(FOLDER, live, method="sync", every=None, keep=9) as ckpt:
            assert ckpt.resume().step == first
            for step in range(first + 1, last + 1):
                there = state(step)
                live["model"].load_state_dict(there["model"].state_dict())
                live["optimizer"].load_state_dict(there["optimizer"].state_dict())
                live["plain"] = there["plain"]
                ckpt.step()
                state(step)  # seeds the generators again: building consumed some
                ckpt.save()
    # As if the process had died between the last marker and the manifest.
    (FOLDER / "timeline-00002/base/000000000004/manifest.json").unlink()


if __name__ == "__main__":
    main()
