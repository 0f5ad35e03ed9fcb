"""Code shared by the verbs of the command.

``errors``  exit codes, errors and JSON output
``output``  tables, labels and sizes for people; parse and format sizes, rates and durations
``runs``    find a run and its bases from a user's argument
``paths``   check paths that users give
``log``     describe the gradient log of a run
``audit``   verify the log, compare bases with replay
"""
