"""Finds or starts a keeper, talks to it, and replaces it when it is lost."""
