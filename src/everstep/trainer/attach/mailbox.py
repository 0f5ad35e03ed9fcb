"""Address at which the keepers of other ranks reach this rank's keeper."""

from __future__ import annotations

from everstep.seams.network.mailbox import ReservedPort, TcpMailbox

__all__ = ["RankMailbox"]


class RankMailbox:
    """Mailbox of a keeper thread, or reserved address of a keeper process.

    This process reserves the port of a keeper process, because other ranks expect a replacement
    keeper at the same port. Without the reservation, the system might assign it to another process
    in between.

    Attributes:
        address: address of the keeper process that was announced to other ranks; None if there is
            none.
    """

    def __init__(self) -> None:
        self.address: tuple[str, int] | None = None
        self._port: ReservedPort | None = None
        self._mailbox: TcpMailbox | None = None

    def reserve(self, host: str, port: int) -> tuple[str, int]:
        """Reserve an address for a keeper process.

        Args:
            port: port that is reserved already; 0 for any free port.
        """
        if not port:
            # The new port before the old one is released: otherwise it might get the same number,
            # which other ranks connect with the earlier start.
            reserved = ReservedPort(host)
            self._release()
            self._port = reserved
            port = reserved.number
        self.address = host, port
        return self.address

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Open the mailbox of a keeper thread; return its address."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox = TcpMailbox(host, port)
        return self._mailbox.address

    def take(self) -> TcpMailbox | None:
        """Return the mailbox of the keeper thread, which closes it from now on."""
        mailbox = self._mailbox
        self._mailbox = None
        return mailbox

    def close(self) -> None:
        """Close the mailbox, and give the port back."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox = None
        self._release()

    def _release(self) -> None:
        before = self._port
        self._port = None
        if before is not None:
            before.close()
