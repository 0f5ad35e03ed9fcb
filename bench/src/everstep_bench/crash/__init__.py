"""Benchmark: share of training that remains with a failure every few seconds (GoCkpt section 5.4).

First it is measured what a save costs each arm, and how long a step takes; from both follows how
often that arm had best save (section 3.1). Then a process trains with that interval, is killed
with SIGKILL at moments that are the same for all arms, its keeper with it, and another process
resumes from what is on the disk, again and again. What counts is the step that is reached in the
end. All of that is real; only the reason why a process ends is made up, and the time that a new
one takes to start (an interpreter, torch, a model: the same for all arms) is left out.

``options``    what is measured
``interval``   how often an arm saves
``arms``       everstep and DCP, so that they can be gone on with
``child``      a process that trains until it is killed
``lives``      starts and kills it
``run``        costs, then lives
``report``     the outcome: targets, plain data
``show``       tables
"""

from __future__ import annotations

__all__: list[str] = []
