"""Shard arithmetic, process groups, and ranks that agree."""
