"""The state at one moment, found without walking through tensors that have not changed.

The room runs in the training process, in the thread that calls ``step()``, at every save. Read in
this order:

``survey``     tensors, entries and objects of the state at one moment
``ownership``  the owner of each entry between two bases: optimizer, log or declared update
``guards``     checks that a module or an optimizer is unchanged since the last survey
"""
