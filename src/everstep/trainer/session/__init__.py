"""One life of a Checkpointer: start, step mark, close. Read ``parts`` and ``lifetime`` first."""
