"""Several ranks that train together: their run folders, their starts, and their exchanges.

Runs in the training process. Read in this order:

- ``job``: one rank of a job, which may be its only one; its place and its folder.
- ``run_folder``: opens the run folders of all ranks as the same run; decides which node's
  memory holds whose copies.
- ``start``: one start of all ranks.
- ``option_check``: checks that all ranks were given the same options.
- ``copies``: opens places for copies.
"""
