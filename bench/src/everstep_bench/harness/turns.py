"""Rounds in which all arms take turns, so that whatever else the machine does meets all alike."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Row

_Row = TypeVar("_Row", bound=Row[Any])


class Turns:
    """Draws the order of arms, and notes in its row what a peer fails with.

    Args:
        seed: of the orders.
        signals: received so far; after one nothing is an arm's own failure.
    """

    def __init__(self, display: Display, seed: int, signals: Sequence[int] = ()) -> None:
        self.display = display
        self._random = random.Random(seed)
        self._signals = signals

    def rounds(
        self,
        what: str,
        rows: Sequence[_Row],
        repeats: int,
        *,
        warm_up: bool = True,
        times: Callable[[_Row], int] = lambda row: 1,
    ) -> Iterator[tuple[int, Iterator[_Row]]]:
        """Yield the number of each round, and its rows in their order; those that failed are left
        out.

        Args:
            warm_up: begin with a round 0, which does not count.
            times: how often an arm comes in each round.
        """
        for number in range(0 if warm_up else 1, repeats + 1):
            order = [row for row in rows if row.error is None for _ in range(times(row))]
            self._random.shuffle(order)
            name = f"round {number} of {repeats}" if number else "warming up"
            self.display.begin(f"{what}, {name}" if what else name, len(order))
            gc.collect()
            yield number, self._each(order)

    def _each(self, order: Sequence[_Row]) -> Iterator[_Row]:
        for row in order:
            self.display.advance(row.name)
            if row.error is None:
                yield row

    @contextlib.contextmanager
    def may_fail(self, row: Row[Any]) -> Iterator[None]:
        """Report a library that does not work on this machine in its row; ours must work."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's own is no Exception
            # A library may have made an error of its own of a signal.
            if row.role != "peer" or self._signals:
                raise
            row.error = in_a_line(error)


def in_a_line(error: BaseException) -> str:
    """Return the error of a library, which may bring the traceback of another process along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{type(error).__name__}: {text}"
