"""What a model writes beside its answer: tool calls and reasoning, told apart as the text comes.

Each format is a small machine (`pieces.Machine`): text in, pieces out, no IO. For every cutting of
a text the pieces, joined, are the same; what turns out to be no call is text, and nothing is lost.
"""
