"""Parts that the verbs of the command share: paths, units, output, exit codes, finding a run."""
