"""The outputs of a run that people look at: reports, pictures, the facts of a card."""
