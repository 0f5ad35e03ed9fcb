"""Two connected sides within this process."""

from __future__ import annotations

import socket
from typing import Any

from everstep.link.wire import Connection
from everstep.seams.sockets import UnixStream


def connected_pair(**options: Any) -> tuple[Connection, Connection]:
    """Two connected sides.

    Args:
        options: arguments of :class:`Connection`, for both sides.
    """
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Connection(UnixStream(one), **options), Connection(UnixStream(other), **options)
