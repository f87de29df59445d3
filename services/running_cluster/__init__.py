"""A running cluster from outside: its programs, their metrics pages, and its behaviour under a load."""
