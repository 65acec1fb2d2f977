"""The demo: its model (`demo_model`), the tasks that the model was trained on, and `make demo`."""
