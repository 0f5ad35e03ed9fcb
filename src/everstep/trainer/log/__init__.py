"""Records gradients and step marks (LowDiff). Read ``recorder`` first."""
