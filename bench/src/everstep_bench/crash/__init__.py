"""Benchmark: share of training that remains with a failure every few seconds (GoCkpt Table 1).

First it is measured what a save costs each arm, and how long a step takes; from both follows how
often that arm had best save (section 3.1). Then a process trains with that interval, is killed
with SIGKILL at moments that are the same for all arms, its keeper with it, and another process
resumes from what is on the disk, again and again. What counts is the step that is reached in the
end. The time that a new process takes to start is left out: it is the same for all arms.

``interval``  costs of a save, the best interval, the share of training that should remain
``lives``     training that is killed again and again, with its keeper
``run``       costs of a save, then lives of all arms
``report``    targets, tables
"""

from __future__ import annotations

__all__: list[str] = []
