"""`outrider doctor`: what a running cluster's speculation gives, what keeps it from giving more, and the remedy."""
