"""Messages between ranks: bytes and back, and nothing of another start of the job (I11)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everstep.commit.job.messages import (
    Answer,
    Command,
    DiskProgress,
    Envelope,
    GiveUpNotice,
    ManifestAck,
    ManifestNotice,
    MarkerNotice,
    MarkersRequest,
    Message,
    ReadBackReply,
    ReadBackRequest,
    StartFailed,
    WatermarkAck,
    WatermarkNotice,
    accept,
    decode_message,
    encode_message,
)
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError
from everstep.format.message_codec import Stored, encode
from everstep.format.names import shard_name
from everstep.format.records import FileRecord, Manifest, Marker

BASE = BaseId(2, 30)
FILE = FileRecord(shard_name(0), 96, 0, "0" * 32, "a" * 32)
MARKER = Marker("run", 2, 30, 30, 0, 1, True, (FILE,))

MESSAGES: list[Message] = [
    MarkerNotice(Stored(MARKER)),
    MarkersRequest(BASE),
    ManifestNotice(Stored(Manifest((MARKER,)))),
    ManifestAck(BASE),
    GiveUpNotice(BASE, "no space left"),
    DiskProgress(),
    ReadBackRequest(BASE),
    ReadBackReply(BASE, ""),
    WatermarkNotice(BASE, (BaseId(1, 20), BaseId(2, 10)), (BaseId(1, 10),)),
    WatermarkAck(BASE, (), (BaseId(1, 10),)),
    Command(3, "offer", b""),
    Answer(3, b"\x00\xff"),
    StartFailed(2, "no space left"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Message) -> None:
    envelope = Envelope("session", 7, message)
    assert decode_message(encode_message(envelope)) == envelope


def test_another_start_of_the_job_is_not_heard() -> None:
    data = encode_message(Envelope("one", 0, WatermarkNotice(BASE, (BaseId(1, 20),))))
    assert accept(data, "another") is None
    assert accept(data, "one") == decode_message(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_cut_short(message: Message) -> None:
    data = encode_message(Envelope("session", 7, message))
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_message(data[:size])


def test_a_marker_is_checked_by_its_digest() -> None:
    data = encode_message(Envelope("session", 0, MarkerNotice(Stored(MARKER))))
    with pytest.raises(DamageError):
        decode_message(data.replace(b"a" * 32, b"b" * 32))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        encode([1, 0, MarkersRequest(BASE)]),
        encode(["s", -1, MarkersRequest(BASE)]),
        encode(["s", 0, 7]),
        encode(["s", 0, DiskProgress()]) + b"\0",
        b"\x93\xa1s\x00" + b"\x91" * 10_000,
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a message between ranks"):
        decode_message(data)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "FromTheFuture"}, r"FromTheFuture.*\$\.kind"),
        ({"kind": "MarkersRequest", "base": [1, 2], "urgent": True}, "unknown field `urgent`"),
        ({"kind": "MarkersRequest"}, "missing required field `base`"),
        ({"kind": "MarkersRequest", "base": [-1, 2]}, r">= 0.*\$\.base\[0\]"),
        ({"kind": "MarkersRequest", "base": [1, 2, 3]}, "at most length 2"),
        ({"kind": "MarkerNotice", "marker": "text"}, "not the bytes of a record"),
        ({"kind": "PeerRoundReply", "base": [1, 2], "state": "lost"}, r"\$\.state"),
        ({"kind": "StartFailed", "rank": 1 << 20, "reason": ""}, r"\$\.rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_message_of_another_version_is_refused_by_name(fields: object, why: str) -> None:
    data = encode(["one", 7, fields])
    with pytest.raises(FormatError, match=f"from rank 7: .*{why}"):
        accept(data, "one")
    assert accept(data, "another") is None, "another start may have other messages"


def test_the_types_survive_a_garbage_collection() -> None:
    """Of some unions msgspec 0.22 makes decoders that crash the collector."""
    code = """
import gc
import everstep.commit.job.messages, everstep.commit.job.agreement, everstep.restore.fetch.peers
gc.collect()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
