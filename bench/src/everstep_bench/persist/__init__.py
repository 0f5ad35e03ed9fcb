"""Benchmark: speed of saving and loading a state: everstep, the disk's limit, other libraries.

One state, one process, one run: every arm saves (or loads) the same live tensors, in rounds.

``arms``    the state; what an arm is: prepared, timed, cleaned up; everstep, and other libraries
``raw``     the limit: O_DIRECT transfers of page-aligned memory, settings to choose from
``run``     screening, rounds; ratios, targets, tables
"""
