"""State that a keeper holds in memory, for restarted trainers, readers and other nodes.

Runs in the keeper process. Read in this order:

``newest_capture``   the newest complete capture of this rank
``memory_bases``     bases of this rank that live in memory only (``method="gemini"``)
``peer_base_store``  copies of other nodes' bases
``peer_log_store``   copies of other nodes' logs
"""
