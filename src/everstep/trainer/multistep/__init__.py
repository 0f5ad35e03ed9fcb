"""Captures a base over several steps (GoCkpt). Read ``multistep`` first."""
