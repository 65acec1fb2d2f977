"""LoRA adapters: many of them, and the model by itself, in one step."""
