"""Benchmark: speed of saving and loading a state: everstep, the disk's limit, other libraries.

One state, one process, one run: every arm saves (or loads) the same live tensors, in rounds.

``state``   the state: a GPT and AdamW with its moments, live tensors
``arms``    what an arm is: prepared, timed, cleaned up
``raw``     the limit: O_DIRECT transfers of page-aligned memory, settings to choose from
``ours``    everstep, by its public interface
``peers``   torch.save, safetensors, torch.distributed.checkpoint, torchsnapshot
``run``     screening, rounds
``report``  ratios, targets, tables
"""

from __future__ import annotations

__all__: list[str] = []
