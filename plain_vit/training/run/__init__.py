"""Records of a run: folder, log, progress, figures, report, and model card."""
