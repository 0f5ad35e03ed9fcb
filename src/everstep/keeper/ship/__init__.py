"""Sends bases and log records to tiers and to the memory of peers."""
