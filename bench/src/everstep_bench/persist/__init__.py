"""Benchmark: speed of saving and loading a state: everstep, the disk's limit, other libraries.

One state, one process, one run: every arm saves (or loads) the same live tensors, in rounds
whose order is drawn anew each time, so that whatever else the machine does meets all of
them alike. Ratios are taken within a round, and their median is what counts.

``state``     the state: a GPT and AdamW with its moments, live tensors
``meter``     wall time, CPU time, and how much of the machine others used meanwhile
``raw``       the limit: O_DIRECT transfers of page-aligned memory, settings to choose from
``ours``      everstep, by its public interface
``peers``     torch.save, safetensors, torch.distributed.checkpoint, torchsnapshot
``arms``      what an arm is: prepared, timed, cleaned up
``machine``   facts about machine and file system; pages out of the cache
``workspace`` room, a folder that is gone afterwards, signals
``run``       screening, rounds
``report``    the outcome: rows, ratios, targets, plain data
``show``      bar, lines, tables
"""

from __future__ import annotations

__all__: list[str] = []
