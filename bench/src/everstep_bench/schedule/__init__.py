"""Checkflow's Table I and Fig. 2, from plans: no device is needed.

``report``  all of it as data, and whether it is what was aimed at
``tables``  the cells, and in which range of the time model each holds
``solving``  how long planning takes, and how near to the best it comes
``show``    what people see
``executed``, ``show_executed``   plans carried out on this machine, behind an emulated link
"""

from __future__ import annotations

__all__: list[str] = []
