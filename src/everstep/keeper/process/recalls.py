"""Contents of the keeper's memory, for a restarted trainer or a process that only reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.format import BasePlan
from everstep.format.writer import Written
from everstep.keeper.held import LookReply, NewestCapture
from everstep.keeper.log import Logs
from everstep.keeper.process.bases import Bases
from everstep.keeper.process.duty import AttachedTrainer
from everstep.keeper.replica import ServedReplica
from everstep.keeper.ship import Couriers, PeerCopies
from everstep.link.messages import identity_to_wire, parts_of, to_plain


class Recalls:
    """Describes the newest base, the logs and the copies of other ranks that are in memory."""

    def __init__(
        self,
        newest_capture: NewestCapture,
        bases: Bases,
        logs: Logs,
        replicas: ServedReplica,
        peers: PeerCopies,
        copies: Couriers,
    ) -> None:
        self._newest_capture = newest_capture
        self._bases = bases
        self._logs = logs
        self._replicas = replicas
        self._peers = peers
        self._copies = copies

    def recall(self, trainer: AttachedTrainer, message: Mapping[str, Any]) -> None:
        """Send everything that is in memory to a restarted trainer: the newest base and
        the logs.

        With ``at``, the state on which the ranks have agreed, the base is that one: the replica's,
        if the replica reaches it, or a capture.
        """
        own = bool(message.get("own"))
        at = None if message.get("at") is None else BaseId(*message["at"])
        reach = self._replicas.reach
        # First: a replica that goes on would change the memory that is about to be described.
        self._replicas.freeze(trainer, own=own, at=None if at is None else at.step)
        if at is not None:
            self._newest_capture.return_to(at)
        found = self._newest_capture.recall(trainer.arena, self._audit, own=own)
        logs = self._logs.recall(trainer, own=own)
        recalled, blobs, arenas = self._in_memory(found, logs)
        # After the last step that has arrived: steps after the resume may replace them.
        if own:
            self._copies.pause()
        # Blobs before the reply that refers to them; in chunks, as one message is limited in size.
        for number, blob in enumerate(blobs):
            for part in parts_of(blob):
                trainer.connection.send({"kind": "blob", "number": number, "part": part})
        fds = [arena.fd for arena in arenas if arena.fd is not None]
        trainer.connection.send({"kind": "recalled", **recalled, "replica": reach}, fds)

    def look(self, *, served: bool) -> LookReply:
        """Return the contents of memory for a process that only reads them.

        Nothing is written, flushed or given up, and no attachment changes. While a trainer is
        alive, only captures with digests are shown: their memory may be overwritten while it is
        read, and only the digest reveals that.

        Args:
            served: True if a live training process is attached.
        """
        writer = self._bases.writer
        unsettled = self._logs.arriving or (writer is not None and bool(writer.waiting))
        # Only without a trainer: freezing stops the replica, which a live trainer still needs.
        if not served and not unsettled:
            self._replicas.freeze(None, own=True)
        pending = self._newest_capture.undigested if served else None
        found = self._newest_capture.look(None if served or unsettled else self._audit)
        return LookReply(
            *self._in_memory(found, self._logs.look()),
            settled=served or not unsettled,
            moves=[] if writer is None else [writer.moves, writer.log_moves],
            pending=None if pending is None else identity_to_wire(pending),
        )

    def _audit(self, plan: BasePlan, written: Sequence[Written]) -> None:
        if (writer := self._bases.writer) is not None:
            writer.audit(plan, written)

    def _in_memory(
        self,
        found: tuple[dict[str, Any], list[bytes], Arena] | None,
        logs: Iterable[tuple[Arena, bytes]],
    ) -> tuple[dict[str, Any], list[bytes], list[Arena]]:
        """Describe the base, the logs and the copies of other ranks that are in memory.

        Returns:
            The fields of a reply; the blobs that they refer to by index; the arenas, likewise.
        """
        base: dict[str, Any] | None = None
        blobs: list[bytes] = []
        arenas: list[Arena] = []
        if found is not None:
            base, blobs, arena = found
            base["arena"] = 0
            arenas = [arena]
        listed = []
        for arena, index in logs:
            if arena not in arenas:
                arenas.append(arena)
            listed.append([len(blobs), arenas.index(arena)])
            blobs.append(index)
        copies, memories = self._peers.recall()
        for place, copy in enumerate(copies, len(arenas)):
            copy["arena"] = place
        arenas += memories
        recalled: dict[str, Any] = {"base": base, "logs": listed, "copies": copies}
        recalled["captures"] = to_plain(self._newest_capture.ids)
        recalled["peer_logs"] = []
        recalled["served"] = self._logs.served_timelines.to_wire()
        rows, memory = self._peers.recall_logs()
        if rows and memory is not None:
            recalled["peer_logs"] = [[len(blobs), len(arenas)]]
            blobs.append(msgpack.packb(rows))
            arenas.append(memory)
        return recalled, blobs, arenas
