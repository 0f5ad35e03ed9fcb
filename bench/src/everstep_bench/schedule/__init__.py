"""Benchmark: plans of captures for eight networks (Checkflow Table I and Fig. 2).

``tables``    the cells, and in which range of the time model each holds
``solving``   how long planning takes, and how near to the best it comes
``report``    targets, tables
``executed``  plans carried out on this machine, over an emulated link
"""

from __future__ import annotations

__all__: list[str] = []
