"""Training of the demo model and of the model of pictures. Not part of the wheel."""
