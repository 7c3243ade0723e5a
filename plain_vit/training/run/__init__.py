"""Records of a run: its folder, log, progress, pictures, report, and the page of its model."""
