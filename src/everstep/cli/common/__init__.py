"""Code shared by the verbs of the command.

``errors``    exit codes, errors and JSON output
``output``    tables, labels and sizes for people
``runs``      find a run and its bases from a user's argument
``paths``     check paths that users give
``units``     parse and format sizes, rates and durations
``log``       describe the gradient log of a run
``audit``     verify the log, compare bases with replay
``pictures``  draw the memory of a step
"""
