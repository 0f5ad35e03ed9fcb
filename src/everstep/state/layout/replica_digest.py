"""Compare the ranks' views of the tensors that they replicate.

A rank writes only its share of replicated tensors, and relies on other ranks to write the rest.
Each rank computes this division by itself (:mod:`everstep.state.ranks.writers`), so ranks that were
given different states would write files that do not form one base. Each rank therefore stores a
digest of its view in its marker, and a base whose markers disagree is not committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from everstep.state.layout.placement import Placement

_LISTED = 4  # ranks, and sections, in an error


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Digest of the tensors of one section that a rank shares with other ranks.

    Attributes:
        ranks: ranks that hold these tensors, this rank included, as in a placement: ``0-3``.
        section: section of the state.
        count: number of tensor names.
        digest: digest of the tensors' descriptions; equal on all of these ranks.
    """

    ranks: str
    section: str
    count: int
    digest: str


def replica_digests(
    lines: Mapping[tuple[tuple[int, ...], str], Iterable[str]],
) -> tuple[ReplicaDigest, ...]:
    """Compute the digests of a rank's replicated tensors.

    Args:
        lines: by ranks and section: a description of each tensor.
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
    """Parse the ranks of a digest.

    Raises:
        ValueError: the text is not a list of ranks.
    """
    return Placement.parse(f"whole@{one.ranks}").ranks or ()


def describe_mismatch(said: Mapping[int, Sequence[ReplicaDigest]]) -> str:
    """Describe the sections in which ranks disagree about replicated tensors; "" if they agree.

    Args:
        said: digests of all ranks, by rank.
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
            wrong.append(f"{key[0]!r}, tensors replicated on ranks {key[1]}: {counts}")
    more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return "; ".join(wrong[:_LISTED]) + more


def _listed(ranks: Sequence[int]) -> str:
    text = " ".join(map(str, ranks[:_LISTED]))
    return text + (" ..." if len(ranks) > _LISTED else "")
