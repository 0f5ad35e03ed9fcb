"""Device to host: lanes carry bytes off the device, base captures say when.

``batches``  what is copied in one go
``lane``     the contract of a copy engine, and the thread that plays one for host memory
``cuda``     side streams; ``pinned``: the host memory that they copy into
``devices``  which lane copies what; ``emulated``: a slow link, for experiments
``base``     a base's bytes straight from live tensors (``sync``)
``updates``  hooks on optimizers: they count updates and hold them back
``audit``    was what was captured what the step left behind?
"""
