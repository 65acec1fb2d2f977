"""Training of the tiny model of pictures; not part of the wheel."""
