"""Experiments that users run with the same command as we do: workloads and the demo.

``workloads/``  what is trained: a byte-level GPT of any size, real text, a training loop
``persist/``    how fast a state becomes durable
``stall/``      what a save costs a training loop
``step/``       what it costs to be able to go back to every step, and what a kill costs then
``multistep/``  bases over several steps: what they hold training up, and the model of that
``crash/``      what is left of training where something fails every so many seconds
``schedule/``   plans of captures for eight networks
``tiers/``      what tiers take of memory, disks and stores over many steps
``demo/``       the main job: train, get killed, resume, compare bit for bit

Files that are not a run's own (texts, journals, logs) are read and written directly here;
everything inside a run folder goes through the Checkpointer and so through the seam.
"""

from __future__ import annotations

__all__: list[str] = []
