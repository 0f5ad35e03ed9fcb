"""Benchmark: what is left of training where something fails every so many seconds (GoCkpt Table 1).

``interval``  costs of a save, the best interval, the share of training that should remain
``lives``     training that is killed again and again, with its keeper
``run``       costs of a save, then lives of all arms
``report``    targets, tables
"""

from __future__ import annotations

__all__: list[str] = []
