"""The bytes on disk. ``docs/FORMAT.md`` has the same as tables; a test compares the two.

``names``    what files are called, and back
``digests``  xxh3-128, of entries, headers and files
``records``  the small JSON files: run, timeline, marker, manifest
``header``   the header of a shard, which is an ordinary safetensors file
``writer``, ``reader``  the body of a shard
"""
