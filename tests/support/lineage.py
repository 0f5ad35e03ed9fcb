"""ServedTimelines of timelines and bases, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from everstep.commit.lineage import BaseId, Branch


def branches(*triples: tuple[int, int | None, int | None]) -> dict[int, Branch]:
    return {number: Branch(number, parent, fork) for number, parent, fork in triples}


@st.composite
def trees(draw: st.DrawFn) -> dict[int, Branch]:
    found: dict[int, Branch] = {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        parent = draw(st.one_of(st.none(), st.integers(1, number - 1))) if number > 1 else None
        found[number] = Branch(number, parent, None if parent is None else draw(st.integers(0, 9)))
    return found


_bases = st.lists(st.builds(BaseId, st.integers(1, 6), st.integers(0, 9)), unique=True)
