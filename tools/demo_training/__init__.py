"""Training of the demo model, and measurement of its drafts. Not part of the wheel."""
