"""Whether it can be told which of several tensors of one name a rank means.

Names are the same on all ranks. Where ranks have different parameters of one name (stages of a
pipeline, say), a rank is known by its number alone: with as many ranks as before, and among the
same ones, it takes what it had. With other numbers, or among other ranks, what it had may be
another stage's of the same shape: it would fit, and be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.errors import RecoveryError
from everstep.restore.load.reshard import Piece, SavedRanks, View
from everstep.state.layout.placement import Box, Placement
from everstep.state.training_state import State

__all__ = ["unclear"]

_Ranks = frozenset[int]


def unclear(saved: SavedRanks, state: State, view: View) -> list[tuple[str, str]]:
    """Parameters, and what optimizers keep for them, of which ranks had different ones, where it
    cannot be told which of them this rank means: ``(name, why)``.

    Not other entries: buffers, random generators and the like are each rank's own by nature.

    Args:
        view: what this rank would restore.

    Raises:
        RecoveryError: the files of other ranks are needed to know.
    """
    if saved.world == 1:
        return []
    here = state.holders()
    found = list[tuple[str, str]]()
    for name, pieces in view.pieces.items():
        held = here(name)
        if held is None:
            continue
        unit, now = held
        took = _ranks(pieces[0], saved.world)
        # What an optimizer has for a parameter this rank means where it means that.
        sure = took, _ranks(view.pieces.get(unit, pieces)[0], saved.world)
        if saved.world == state.ranks.world and any(now <= ranks for ranks in sure):
            continue
        others = _different(saved, name, pieces)
        if others is not None:
            found.append(
                (
                    name,
                    f"rank(s) {_text(took)} had one, {others} another; rank(s) "
                    f"{_text(now)} of {state.ranks.world} may mean either",
                )
            )
    return found


def _different(saved: SavedRanks, name: str, pieces: Sequence[Piece]) -> str | None:
    """Who had another tensor of that name; None: nobody."""
    mine = {piece.box: piece.digest for piece in pieces}
    versions: dict[tuple[int, ...] | None, dict[Box, str]] = {}
    for piece in saved.all_pieces(name):
        versions.setdefault(piece.placement.ranks, {})[piece.box] = piece.digest
    for ranks, version in versions.items():
        if version != mine and ranks is not None:
            return f"rank(s) {_text(ranks)}"
    known = {rank for ranks in versions for rank in ranks or range(saved.world)}
    hidden = set(range(saved.world)) - known - set(saved.ranks)
    if hidden:
        raise RecoveryError(
            f"rank(s) {_text(_ranks(pieces[0], saved.world))} had {name!r} alone; what rank(s) "
            f"{_text(hidden)} had of that name is needed to know whose it is now, and not here",
            hint="make the run folders of the hosts that had them readable here",
        )
    return None


def _ranks(piece: Piece, world: int) -> _Ranks:
    ranks = piece.placement.ranks
    return frozenset(range(world) if ranks is None else ranks)


def _text(ranks: Iterable[int]) -> str:
    return Placement(tuple(sorted(ranks))).text.partition("@")[2]
