"""Several ranks that train together: their run folders, their starts, and their exchanges.

Runs in the training process. Read in this order:

- ``job``: one rank of a job, which may be its only one; used by the session.
- ``run_folder``: opens the run folders of all ranks as the same run.
- ``start``: one start of all ranks.
- ``option_check``: checks that all ranks were given the same options.
- ``peer_nodes``: which node's memory holds whose copies.
- ``copies``: opens places for copies.
"""
