"""Retention: what may go, and that the last good base never does (I5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import RetentionPlan, plan_retention

ONE = {1: Branch(1, None, 0)}
BASES = [BaseId(1, step) for step in (10, 20, 30, 40)]


def test_keeps_the_newest() -> None:
    plan = plan_retention(BASES, ONE, keep=2, verified={BASES[3]}, damaged=set())
    assert plan == RetentionPlan(delete=(BASES[0], BASES[1]))


def test_nothing_goes_before_something_that_stays_is_verified() -> None:
    plan = plan_retention(BASES, ONE, keep=2, verified={BASES[0]}, damaged=set())
    assert plan == RetentionPlan(verify=BASES[3])


def test_a_damaged_base_does_not_count() -> None:
    plan = plan_retention(BASES, ONE, keep=2, verified={BASES[2]}, damaged={BASES[3]})
    assert set(plan.delete) == {BASES[0], BASES[3]}


def test_with_too_few_good_ones_nothing_goes() -> None:
    plan = plan_retention(BASES[:2], ONE, keep=2, verified={BASES[0]}, damaged={BASES[1]})
    assert plan == RetentionPlan()


def test_abandoned_branches_go_first() -> None:
    tree = {1: Branch(1, None, 0), 2: Branch(2, 1, 10)}
    bases = [BaseId(1, 10), BaseId(1, 500), BaseId(2, 20)]
    plan = plan_retention(bases, tree, keep=2, verified={BaseId(2, 20)}, damaged=set())
    assert plan.delete == (BaseId(1, 500),)


def test_what_is_spared_stays_in_the_place_of_others() -> None:
    every = set(BASES)
    plan = plan_retention(BASES, ONE, keep=2, verified=every, damaged=set(), spared={BASES[0]})
    assert every - set(plan.delete) == {BASES[0], BASES[-1]}
    plan = plan_retention(
        BASES, ONE, keep=2, verified=every, damaged=set(), spared={BASES[0], BASES[1]}
    )
    assert every - set(plan.delete) == {BASES[0], BASES[1], BASES[-1]}, "the newest, too"


def test_what_is_needed_stays_beyond_what_is_kept() -> None:
    every = set(BASES)
    plan = plan_retention(BASES, ONE, keep=2, verified=every, damaged=set(), needed={BASES[0]})
    assert plan.delete == (BASES[1],)


_some = st.sets(st.builds(BaseId, st.integers(1, 3), st.integers(0, 5)), max_size=12)


@given(_some, _some, _some, st.integers(1, 4), st.integers(0, 5), st.integers(0, 5))
def test_never_the_last_verified(
    committed: set[BaseId],
    verified: set[BaseId],
    damaged: set[BaseId],
    keep: int,
    fork_2: int,
    fork_3: int,
) -> None:
    tree = {1: Branch(1, None, 0), 2: Branch(2, 1, fork_2), 3: Branch(3, 2, fork_3)}
    plan = plan_retention(committed, tree, keep=keep, verified=verified, damaged=damaged)
    stays = committed - set(plan.delete)
    assert set(plan.delete) <= committed
    if plan.delete:
        assert plan.verify is None
        assert (stays & verified) - damaged
        assert len(stays) == keep
    if plan.verify is not None:
        assert plan.verify in committed - damaged - verified
        after = plan_retention(
            committed, tree, keep=keep, verified=verified | {plan.verify}, damaged=damaged
        )
        assert after.delete, "verifying what was asked for must let retention go on"


@given(_some, st.integers(1, 4))
def test_running_it_again_changes_nothing(committed: set[BaseId], keep: int) -> None:
    tree = {1: Branch(1, None, 0), 2: Branch(2, 1, 3), 3: Branch(3, 2, 3)}
    plan = plan_retention(committed, tree, keep=keep, verified=committed, damaged=set())
    stays = committed - set(plan.delete)
    assert len(stays) == min(keep, len(committed))
    again = plan_retention(stays, tree, keep=keep, verified=stays, damaged=set())
    assert again == RetentionPlan()


@given(_some, _some, _some, st.integers(1, 4), st.integers(0, 5))
def test_what_is_spared_and_not_damaged_is_never_deleted(
    committed: set[BaseId], spared: set[BaseId], damaged: set[BaseId], keep: int, fork: int
) -> None:
    tree = {1: Branch(1, None, 0), 2: Branch(2, 1, fork), 3: Branch(3, 2, fork)}
    given = {"keep": keep, "verified": committed, "damaged": damaged}
    without = committed - set(plan_retention(committed, tree, **given).delete)
    stays = committed - set(plan_retention(committed, tree, **given, spared=spared).delete)
    good = committed - damaged
    assert stays >= good & spared
    assert len(stays & good) <= max(keep, 1 + len(good & spared))
    assert len(stays & good) >= len(without & good), "no fewer than without"
    if good:
        newest = plan_retention(good, tree, keep=1, verified=good, damaged=set()).delete
        assert stays >= good - set(newest), "the newest along the history"
