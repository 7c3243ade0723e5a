"""Processes, memory and sharding of a run."""
