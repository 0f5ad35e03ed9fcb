"""What survives, and how it comes back.

``scan``    reads what a run folder holds: records only, no data
``decide``  in which order bases are tried; without I/O
``load``    reads a base into live objects, verified
``verify``  reads a base and believes nothing
``audit``   base A + log = base B? (``audit_process``: asked by the keeper; ``audits``: the answers)
"""
