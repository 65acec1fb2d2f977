"""The memory plan: where every byte of a GPU's budget goes. Plain arithmetic; nothing here imports
torch, so that `actorium plan` answers at once."""
