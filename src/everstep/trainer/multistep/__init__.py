"""Capture a base over several steps (GoCkpt, section 4); runs in the training process.

If copying the state takes longer than a forward and backward, each step copies one *part* of it,
and the gradients that bring earlier parts to the step of the last one. The steps of one base are
its *window*. With them the keeper, or whoever restores the base, brings all parts to one version.

The paper's ideas, in the order in which to read the modules:

- ``driver``: takes one window after the other, at step marks and updates (4.1, figure 2b).
- ``window``: a base in progress: its parts, the updates since, the handover to the keeper (4.2.1);
  the step at which it ends, alone or agreed among ranks (4.5), and what follows one that is void.
- ``copies``: copies of parts, and of the gradients that updates consume; gradients go first
  (4.2.2).
- ``held_gradients``: gradients whose copies continue during the next forward: GoCkpt-O (4.2.4).
- ``partition``: number and contents of the parts; the size of chunks (4.2.3, 4.4.2).
- ``plan``: parts, copies and memory of a window, planned before the base is due.
- ``measurements``: durations of steps, and costs of windows, for the model of 4.2.3.

Elsewhere: the model itself is :mod:`everstep.plan.multistep`; the copies run on lanes with streams
and pinned memory (:mod:`everstep.capture.cuda`, 4.4); the reconstruction (4.3) is
:mod:`everstep.keeper.replica`, or :mod:`everstep.restore.redo` with ``rebuild="recovery"``.
Design and limits: ``docs/design/multistep.md``."""

from everstep.trainer.multistep.driver import MultistepDriver
from everstep.trainer.multistep.measurements import MultistepReport
from everstep.trainer.multistep.plan import replayable_gradient_bytes
from everstep.trainer.multistep.window import window_end

__all__ = ["MultistepDriver", "MultistepReport", "replayable_gradient_bytes", "window_end"]
