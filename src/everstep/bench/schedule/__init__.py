"""Checkflow's Table I and Fig. 2, from plans: no device is needed.

``tables``  the cells, and in which range of the time model each holds
``show``    what people see
"""

from __future__ import annotations

__all__: list[str] = []
