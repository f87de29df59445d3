"""Parses the text of a model into reasoning, content and tool calls.

Every format is a program that reads one character after the other and reports what it has parsed. So the result does
not depend on how the text is split into pieces, and whole and streamed answers are equal.
"""
