"""Benchmark: cost of a save for training: everstep, other libraries, no checkpoint.

One training, one process, one run. In each round every arm trains for a block of steps with
one save in it, and the ideal trains for as many without; the order is drawn anew each time,
so that whatever else the machine does meets all of them alike. What a save costs is measured
twice: as time that the training thread spends inside the library, and as the difference
between two blocks of the same round. What the first does not explain is interference.

``options``   what is measured; what the words on the command line mean
``loop``      training as a loop of timed steps; the state as peers are given it
``cores``     which threads and processes run where
``gauges``    memory and processor time of processes
``arms``      what an arm is; a save under way
``ours``      everstep, by its public interface, and with mechanisms taken away
``running``   runs of everstep inside a benchmark
``dcp``       torch.distributed.checkpoint
``peers``     torch.save, torchsnapshot, torch_checkpointing
``files``     what peers write: named anew, synced where they do not, removed
``writers``   other processes that flush at the same time; ``writer`` is one of them
``recording`` when lanes copied what; what keepers and links did over time
``figures``   blocks and the arithmetic on them
``run``       warm-up, rounds
``report``    the outcome: targets, plain data
``show``      tables
``timeline``  a trace for a browser, pictures
"""

from __future__ import annotations

__all__: list[str] = []
