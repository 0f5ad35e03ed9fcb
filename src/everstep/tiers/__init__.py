"""Places that store objects: memory, disks, object stores, with one interface.

Used in training and keeper processes. Read in this order:

``contract``       the guarantees of every tier, tested by ``testing/conformance``; complete,
                   checked reads
``memory``         objects in memory; files read from memory
``disk_tier``      objects as files in a directory
``object``         objects in a store (S3 and similar)
``retry``          retry operations that a store refuses temporarily
``options``        options that a user sets for a place; open the tier that a URL or path names
``files``          a tier as a file system for reading
``durable_files``  small durable files on disk; errors of the operating system as our errors; files
                   of deleted bases, kept for reuse
"""

from everstep.tiers.contract import Tier, read_record
from everstep.tiers.durable_files import (
    SlotStore,
    ensure_dir,
    remove_if_there,
    storage_errors,
    write_durably,
)
from everstep.tiers.memory import MemoryFile
from everstep.tiers.options import PeerOptions, TierOptions

__all__ = [
    "MemoryFile",
    "PeerOptions",
    "SlotStore",
    "Tier",
    "TierOptions",
    "ensure_dir",
    "read_record",
    "remove_if_there",
    "storage_errors",
    "write_durably",
]
