"""Benchmark: cost of being able to resume from every step, and cost of a kill.

One training, one process, many arms (LowDiff section VIII, experiments 1 to 8). In each round
every arm is opened on the same training, warms up, trains for a block of timed steps, and is
closed; training without anything, and compressed training without a log, have two blocks in each
round, and how much those differ is the noise. Then a process for each arm trains, is killed with
SIGKILL, and another one resumes: how many steps are lost, how long it takes, and whether what
comes out of it in the end is bit for bit what an uninterrupted training gives.

``options``    what is measured; arms, and what they are told
``arms``       what an arm is; training alone, compressed training, torch.save
``ours``       everstep, by its public interface
``naive``      differences of the whole state, as LowDiff's baseline takes them
``figures``    blocks and the arithmetic on them
``rounds``     blocks of all arms, in turns
``child``      a process that trains and is killed; ``kills`` starts it
``recovery``   how fast logged steps are replayed; ``recovered`` is a process that it starts
``rate``       what a replica keeps up with
``run``        all of it
``report``     the outcome: targets, plain data
``show``       tables
``frequency``  the smallest interval that costs no more than so much
"""

from __future__ import annotations

__all__: list[str] = []
