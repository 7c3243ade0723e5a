"""Outputs of a run for people: reports, pictures, and facts for model cards."""
