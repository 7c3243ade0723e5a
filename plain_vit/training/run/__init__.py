"""Records of a run: its folder, log, progress and trackers."""
