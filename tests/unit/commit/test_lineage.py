"""History: which bases the newest timeline descends from (I7)."""

from __future__ import annotations

from hypothesis import given

from everstep.commit.lineage import BaseId, Branch, history, split_by_history
from tests.support.lineage import _bases, branches, trees


def test_a_rewind_is_not_undone() -> None:
    """After a rewind to 100, step 500 of the old timeline is not in the history."""
    old = [BaseId(1, 100), BaseId(1, 500)]
    here, elsewhere = split_by_history(old, branches((1, None, 0), (2, 1, 100)))
    assert here == [BaseId(1, 100)]
    assert elsewhere == [BaseId(1, 500)]


def test_newest_first_along_the_history() -> None:
    tree = branches((1, None, 0), (2, 1, 300), (3, 2, 500))
    bases = [BaseId(3, 600), BaseId(2, 400), BaseId(2, 500), BaseId(1, 300), BaseId(1, 200)]
    here, elsewhere = split_by_history([*bases, BaseId(2, 501), BaseId(1, 301)], tree)
    assert here == [BaseId(3, 600), BaseId(2, 500), BaseId(2, 400), BaseId(1, 300), BaseId(1, 200)]
    assert elsewhere == [BaseId(2, 501), BaseId(1, 301)]


def test_a_fork_past_a_timeline_leaves_it_out() -> None:
    """Timeline 3 forked from 1 directly: nothing of 2 counts, however new."""
    here, elsewhere = split_by_history(
        [BaseId(1, 100), BaseId(2, 900)], branches((1, None, 0), (2, 1, 100), (3, 1, 100))
    )
    assert (here, elsewhere) == ([BaseId(1, 100)], [BaseId(2, 900)])


def test_a_fresh_start_has_no_past() -> None:
    here, elsewhere = split_by_history([BaseId(1, 100)], branches((1, None, 0), (2, None, 0)))
    assert (here, elsewhere) == ([], [BaseId(1, 100)])


def test_a_damaged_record_counts_all_of_the_one_before() -> None:
    here, _ = split_by_history([BaseId(1, 900)], branches((1, None, 0), (2, 1, None)))
    assert here == [BaseId(1, 900)]


def test_a_parent_that_is_not_older_ends_the_history() -> None:
    """Hostile records: no endless loop."""
    assert history(2, branches((1, 2, 5), (2, 2, 5))) == [(2, None)]


def _reached(base: BaseId, tree: dict[int, Branch]) -> bool:
    """The oracle: walks from the newest timeline to the base, fork by fork."""
    at, limit = max(tree), 10**9
    while True:
        if base.timeline == at:
            return base.step <= limit
        branch = tree[at]
        if branch.parent is None:
            return False
        assert branch.fork_step is not None
        at, limit = branch.parent, branch.fork_step


@given(_bases, trees())
def test_against_a_walk(bases: list[BaseId], tree: dict[int, Branch]) -> None:
    here, elsewhere = split_by_history(bases, tree)
    assert sorted(here + elsewhere) == sorted(bases)
    assert here == sorted(here, reverse=True)
    for base in bases:
        assert (base in here) == _reached(base, tree)
