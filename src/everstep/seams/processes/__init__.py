"""Processes, threads and signals: starting, watching and ending them."""
