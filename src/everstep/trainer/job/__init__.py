"""Several ranks: their start, and agreement at step boundaries."""
