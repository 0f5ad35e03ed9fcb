"""Whether what each rank says it has in common with others is what these say.

A rank writes only its part of what several have in common, and refers to the others' for the rest.
Each decides that by itself (:mod:`everstep.state.ranks.writers`), so ranks that were given other
states
would write parts that do not fit together. What each of them goes by is in its marker, and parts
that do not fit are those of no base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from everstep.state.layout.placement import Placement

__all__ = ["ReplicaDigest", "describe_mismatch", "ranks_of_digest", "replica_digests"]

_LISTED = 4  # ranks, and sections, in an error


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """What a rank has in common with others of one section of its state.

    Attributes:
        ranks: those that have it, itself included, as in a placement: ``0-3``.
        count: of names of tensors.
        digest: of what each of them is: the same on all of these ranks.
    """

    ranks: str
    section: str
    count: int
    digest: str


def replica_digests(
    lines: Mapping[tuple[tuple[int, ...], str], Iterable[str]],
) -> tuple[ReplicaDigest, ...]:
    """As a rank says it.

    Args:
        lines: by ranks and section: one for each tensor.
    """
    found = []
    for (ranks, section), of_section in lines.items():
        text = "\n".join(known := sorted(of_section))
        runs = Placement(tuple(sorted(ranks))).text.partition("@")[2]
        found.append(
            ReplicaDigest(runs, section, len(known), xxhash.xxh3_128_hexdigest(text.encode()))
        )
    return tuple(sorted(found, key=lambda one: (one.section, one.ranks)))


def ranks_of_digest(one: ReplicaDigest) -> tuple[int, ...]:
    """The ranks, as numbers.

    Raises:
        ValueError: the text is none of ranks.
    """
    return Placement.parse(f"whole@{one.ranks}").ranks or ()


def describe_mismatch(said: Mapping[int, Sequence[ReplicaDigest]]) -> str:
    """Where ranks differ in what they have in common, in words; "" if they do not.

    Args:
        said: by rank, of all ranks.
    """
    if not any(said.values()):
        return ""
    by_rank = {rank: {(o.section, o.ranks): o for o in each} for rank, each in said.items()}
    groups = {key: one for each in by_rank.values() for key, one in each.items()}
    wrong: list[str] = []
    for key, group in sorted(groups.items()):
        versions: dict[tuple[int, str], list[int]] = {}
        for rank in ranks_of_digest(group):
            mine = by_rank.get(rank, {}).get(key)
            version = (0, "") if mine is None else (mine.count, mine.digest)
            versions.setdefault(version, []).append(rank)
        if len(versions) > 1:
            counts = ", ".join(
                f"rank(s) {_listed(ranks)}: {count or 'none'}"
                for (count, _), ranks in sorted(versions.items(), key=lambda item: item[1])
            )
            wrong.append(f"{key[0]!r}, tensors that ranks {key[1]} have in common: {counts}")
    more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return "; ".join(wrong[:_LISTED]) + more


def _listed(ranks: Sequence[int]) -> str:
    text = " ".join(map(str, ranks[:_LISTED]))
    return text + (" ..." if len(ranks) > _LISTED else "")
