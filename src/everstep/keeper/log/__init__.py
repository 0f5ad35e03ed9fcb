"""The gradient log in the keeper: receive records, keep them in memory, write them to segments.

Runs in the keeper process, or as a thread of the training process where there is none. Read in this
order:

``logs``           the logs of all timelines that this keeper has served
``log_store``      one log: its records in memory, and its thread that digests and writes them
``segment_queue``  collect records for segments, as many steps as the disk needs; make one segment
                   durable
``disk_space``     the log's share of ``Budget(disk_bytes=)``
``recall_wire``    send captures and logs to a restarted training process
"""
