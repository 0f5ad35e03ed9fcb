"""Copies from device to host in the training process: lanes copy, captures decide when.

Read in this order:

``lanes``             ordered copies from a device into host memory
``update_hooks``      hooks on optimizers: count updates, and hold them back until copies are made
``dispatch``          copies issued at planned events of a step (``schedule``); events of a training
                      step, as seen by hooks
``spot_check``        comparison of samples of a capture with the live state
``mark_samples``      samples in step marks of the log, compared during replay
``version_counters``  detection of writes by torch's version counters
"""
