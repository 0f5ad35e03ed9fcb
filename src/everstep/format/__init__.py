"""Bytes on disk, as specified in ``docs/FORMAT.md``; a test compares the two.

Used in both processes, and by the read-only commands. Read in this order:

``names``    names of files and directories, and their parsing
``digests``  xxh3-128 of entries, headers and files
``records``  the small JSON files: run, timeline, marker, manifest, audit
``header``   header of a shard (one file of a base, in safetensors format); layout of the files of a
             base, planned before they are written
``writer``   writing of a shard, bypassing the page cache
``reader``   reading and verification of a shard
``log``      records of the gradient log, and the segment files that contain them

``message_codec``  messages between processes, which contain some of these bytes: types and encoding
"""

from everstep.format.digests import digest
from everstep.format.header import BasePlan, ShardIdentity
from everstep.format.names import MANIFEST, base_dir, timeline_dir
from everstep.format.records import FileRecord, Manifest, Marker, TimelineRecord

__all__ = [
    "MANIFEST",
    "BasePlan",
    "FileRecord",
    "Manifest",
    "Marker",
    "ShardIdentity",
    "TimelineRecord",
    "base_dir",
    "digest",
    "timeline_dir",
]
