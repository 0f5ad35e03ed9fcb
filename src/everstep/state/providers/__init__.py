"""State providers: how each kind of value in the user's state is collected and restored.

Read ``providers`` first, then ``optimizers`` (state named by parameter).
"""
