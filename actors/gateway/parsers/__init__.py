"""What a model writes beside its answer: tool calls and reasoning, told apart as the text comes.

Each format is a small state machine (`parts.OutputParser`): text in, parts of the message out, no
IO. However a text is cut, the parts, joined, are the same; what turns out to be no call is text,
and nothing is lost.
"""
