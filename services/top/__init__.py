"""`outrider top`: a running cluster's numbers, live in the terminal."""
