"""Fetches copies of bases and log segments: from keepers' memory, from peers, from tiers."""
