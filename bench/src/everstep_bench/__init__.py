"""Benchmarks and drills: the commands ``everstep bench`` and ``everstep drill``.

``cli/``        both commands, plugged into everstep's by entry points
``options``     what each verb of ``everstep bench`` takes
``harness/``    what all benches share: options, turns, children, reports
``persist/``    how fast a state becomes durable
``stall/``      what a save costs a training loop
``step/``       what it costs to be able to go back to every step, and what a kill costs then
``multistep/``  bases over several steps: what they hold training up, and the model of that
``crash``       what is left of training where something fails every so many seconds
``schedule/``   plans of captures for eight networks
``tiers/``      what tiers take of memory, disks and stores over many steps
``convergence`` training on compressed gradients, next to dense training
``lossy``       training on through failures, from a log of lossy gradients
``device``      raw figures of a CUDA device, for ``scripts/gpu_check.sh``
``drill/``      hosts that train together are killed, replaced, and compared bit by bit

Files that are not a run's own (texts, journals, logs) are read and written directly here;
everything inside a run folder goes through the Checkpointer and so through the seam.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
