"""Processes, threads and signals: start, watch and end them.

``processes``  start a detached process, watch a process by PID, limits, processor cores; low-
               priority child processes that end with their parent
``threads``    I/O threads that keep working at interpreter exit; conditions and futures that are
               safe against Ctrl-C
``signals``    note SIGTERM and similar signals for a main loop
``runtime``    folder for sockets and locks
"""
