"""The keeper process: accept trainers and dispatch their messages to duties.

Runs in the keeper process. Read in this order:

``server``   the event loop: connections, attach and detach, liveness of the trainer
``duties``   one method for each message of the trainer that is attached
``auditor``  the background audit: compare a base with the previous base and the log
"""
