"""Parses the text of a model into reasoning, content and tool calls.

Every format is a program that reads one character after the other and says what it has understood. So an answer means
the same whatever the pieces it comes in, and whole and streamed answers are one.
"""
