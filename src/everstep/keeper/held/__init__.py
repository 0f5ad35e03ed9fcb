"""State that a keeper holds in memory: captures, peers' copies, and the view of them for
readers."""
