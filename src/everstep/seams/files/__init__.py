"""Files: the file-system contract, its implementation on Linux, locks, stall detection.

``filesystem``  contract; read this first
``posix``       implementation with system calls
``stalls``      tell slow storage from storage that hangs
``locks``       files locked for the lifetime of their owner (``flock``)
``claims``      numbers claimed by processes through locks on bytes of a file
"""
