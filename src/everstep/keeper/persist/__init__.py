"""Make captured bases durable: write, commit and audit them.

Runs in the keeper process, or as a thread of the training process where there is none. Read in
this order:

``local_keeper``  the queue: one base after another, then retention
``persister``     one base of a single rank: files, marker, manifest; the digest audit
``static_files``  hard links to files of entries that never change
``rank_commits``  one base together with other ranks: messages, deadlines, retries
``rank_disk``     disk operations of such a commit
"""
