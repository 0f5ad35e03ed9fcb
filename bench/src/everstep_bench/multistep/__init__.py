"""Benchmark: stall of a multi-step base, next to the model of it (GoCkpt section 4.2).

A training of real compute, whose steps are as long as is asked for, has a state whose gradients are
a given share of it. everstep's copies go through an emulated link that takes so many steps for the
whole state. For each number of parts it is measured how long training is held up, and that is
compared with what :mod:`everstep.plan.multistep` says, fed with nothing but the link's bandwidth,
bytes, and the lengths of steps in which nothing was saved.

``training``  steps of a given length, gradients of a given share
``run``       one Checkpointer, and saves of it; all of them
``report``    measured and modelled, side by side; targets, tables
"""
