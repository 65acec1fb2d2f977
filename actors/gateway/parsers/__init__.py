"""Parsers of a model's output: they separate tool calls and reasoning from the answer as text
arrives.

Each format is a small state machine (`parts.OutputParser`): text in, parts of the message out, no
IO. However a text is cut, the joined parts are the same; what turns out not to be a call is text,
and nothing is lost.
"""
