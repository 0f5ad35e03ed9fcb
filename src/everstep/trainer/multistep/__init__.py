"""Capture a base over several steps (GoCkpt, section 4); runs in the training process.

A *window* spans the steps of one base. Each step copies one *part* of the state, and the gradients
that bring earlier parts to the step of the last one. Read in this order:

- ``driver``: begins, continues and ends windows, at step marks and updates.
- ``rank_driver``: the same for several ranks, which end all windows at one agreed step.
- ``window``: a base in progress, and its handover to the keeper.
- ``plan``: the parts of a window, planned before the base is due.
- ``partition``: into how many parts, and which, by the measured link and steps.
- ``copies``: copies of parts, and of the gradients that updates consume.
- ``held_gradients``: gradients whose copies continue after their update (GoCkpt-O).
- ``measurements``: durations of steps, and costs of windows."""
