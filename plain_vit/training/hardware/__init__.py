"""Processes, memory and sharding: where a run takes place."""
