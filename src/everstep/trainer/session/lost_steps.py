"""Says what is lost with keepers that are gone, where nobody else would."""

from __future__ import annotations

from everstep.config.options import Options
from everstep.errors import EverstepError, FencedError, KeeperError
from everstep.link.channel import BackgroundChannel
from everstep.link.save import Save
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.remote import RemoteKeeper

__all__ = ["is_lost", "tell_if_bases_are_lost", "tell_if_steps_are_lost"]


def is_lost(save: Save | None) -> bool:
    """Whether a base that was to hold what the log has is not durable: another rank may have taken
    none, whose keeper stays with its log; without this one's that would be of no use."""
    return save is not None and not (save.durable.done() and save.durable.exception() is None)


def tell_if_bases_are_lost(
    save: Save | None, before: Keeper, keepers: Keepers, channel: BackgroundChannel, *, alone: bool
) -> None:
    """Whoever waits for bases hears which ones are not there, behind a keeper that was replaced.

    Args:
        save: of the base that was to make up for what was lost with that keeper, if there is one.
        before: that keeper.
        alone: there are no other ranks, which would hear of it from their keepers.
    """
    _tell_if_lost_again(save, keepers.lost, channel)
    if not alone:
        _tell_if_lost_for_all(before, channel)


def tell_if_steps_are_lost(
    step: int,
    keepers: Keepers,
    options: Options,
    channel: BackgroundChannel,
    failed: list[EverstepError],
) -> None:
    """Training has ended, and no keeper could be put in the place of one that is gone: says up to
    which step there is a base. One that serves another process has said so itself.

    Args:
        step: the last one.
        failed: gets it first, if the policy is to raise.
    """
    why = keepers.attempts.why_not
    durable_step = keepers.stats.durable_step
    if why is None or isinstance(why, FencedError) or step == (durable_step or 0):
        return
    base = (
        "there is no base" if durable_step is None else f"the newest base is of step {durable_step}"
    )
    but = (
        ", except for those that its log has on disk"
        if options.logs and options.log.on_disk
        else ""
    )
    error = KeeperError(
        f"training has ended at step {step} without a keeper, which could not be replaced: {base}, "
        f"as far as is known here, and steps behind that are lost{but}. {why.message}",
        step=step,
        path=why.path,
        hint=why.hint,
    )
    channel.post(error, first=True)
    try:
        channel.check()
    except EverstepError as raised:
        failed.insert(0, raised)


def _tell_if_lost_again(
    save: Save | None, lost: EverstepError | None, channel: BackgroundChannel
) -> None:
    """Two keepers in a row are gone, the second with the base that was to make up for the first:
    whoever waits for it must hear that it is not there."""
    if save is None or lost is None or not is_lost(save):
        return
    channel.post(
        KeeperError(
            f"two keepers in a row are gone: nothing is durable of step {save.step}. The second: "
            f"{lost.message}",
            step=save.step,
            hint="dmesg tells whether they were killed for memory; each call of save() or wait() "
            "tries again",
        )
    )


def _tell_if_lost_for_all(keeper: Keeper, channel: BackgroundChannel) -> None:
    """Other ranks hear from their keepers that no rank has a base which was lost with this one's
    keeper; whoever waits for it here must hear of it, too."""
    if not isinstance(keeper, RemoteKeeper) or keeper.lost is None or not keeper.lost_steps:
        return
    steps = sorted(keeper.lost_steps)
    bases = f"the base{'s'[: len(steps) > 1]} of step {', '.join(map(str, steps))}"
    channel.post(
        KeeperError(
            f"no rank has {bases}: {keeper.lost.message}",
            step=steps[-1],
            hint="training goes on; the next base is taken as usual",
        )
    )
