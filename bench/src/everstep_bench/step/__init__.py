"""Benchmark: what it costs to be able to go back to every step, and what a kill costs then.

``arms``       an arm, and what it is told: training alone, torch.save, DCP, everstep
``rounds``     blocks of all arms in turns, and the arithmetic on them
``frequency``  the smallest interval within a slow-down
``kills``      training processes (``child``) that are killed, and what the next one gets back
``recovery``   speed of replay; ``recovered``: its child process
``run``        all of it
``report``     targets, tables
"""
