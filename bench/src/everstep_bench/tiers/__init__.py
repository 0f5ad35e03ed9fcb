"""Benchmark: bytes in memory, disks and stores, and the cost of tiers (TierCheck, experiment 9).

Ranks train together, each with a run folder and a node of its own, which is emulated: a process
group and a folder of this machine. Their bases go to their disks, to the memory of the next node's
keeper, and to a durable place. While they do, everything is looked at from outside: sizes of files,
and of the keepers' shared memory as the kernel counts it. It is held against what was printed at
the start. The same training without tiers says what they add.

``child``  one rank
``run``    both trainings; how many bytes are where; targets, tables, a picture
"""
