"""Where bytes live: one contract, and what keeps it.

``contract``  what every tier promises; ``testing/conformance`` checks it
``memory``    objects in memory; files that are not on a disk
``folder``    objects as files in a directory
``object``    objects in a store (S3 and its likes), with ``object_errors``
``retry``     tries again what may be tried again
``rate``      how many objects an hour
``urls``      which tier a URL or path names; ``options``: what a user can say of it
``files``     a tier as a file system to read from
``streams``   sources read whole and checked
``disk``      durable small files, and the translation of the operating system's errors
``slots``     files of reclaimed bases, kept to be overwritten
"""
