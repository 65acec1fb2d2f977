"""Training of the demo model, and what its drafts are worth. Not part of the wheel."""
