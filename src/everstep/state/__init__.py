"""The saved state: providers, entries, ownership and layout.

Runs in the training process; ``layout`` and ``values`` also serve the keeper and restores. Read in
this order:

``layout``          entries, placements over ranks, offsets in files, reserved names
``values``          tensors, plain objects and random generators, as entries and as bytes
``survey``          tensors, entries and objects of the state at one moment
``ownership``       how each entry changes between two bases: by an optimizer that replay runs
                    again, logged at step marks, by a declared update, never
``guards``          checks that a module or an optimizer is unchanged since the last survey
``positions``       positions of data loaders
``providers``       one provider per value of the state dict: survey and restore it
``ranks``           state on several ranks: the writer, and the log, of replicated state
``training_state``  ``State``: the user's state dict as a whole
``coverage``        data of the training that the state does not contain
"""
