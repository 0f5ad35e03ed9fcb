"""Code shared by the verbs of the command.

``errors``  exit codes, errors and JSON output
``output``  tables, labels and sizes for people; parse and format sizes, rates and durations
``runs``    check paths that users give; find a run and its bases
``log``     describe the gradient log of a run
"""
