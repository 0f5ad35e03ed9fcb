"""Where bytes live. This version has one tier: a directory on a file system.

``disk``   durable small files, and the translation of the operating system's errors
``slots``  files of reclaimed bases, kept to be overwritten
"""
