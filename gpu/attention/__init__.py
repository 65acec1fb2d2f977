"""Attention over pages: its backends behind one contract, which runs, and how a step is planned."""
