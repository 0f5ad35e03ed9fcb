"""Between the training process and the keeper: messages, their encoding, and shared captures.

Read ``messages`` and ``wire`` first, then ``registry`` and ``spawn`` (finding and starting a
keeper)
and ``capture`` (a base in shared memory). Both processes import this package; it imports neither.
"""
