"""`outrider doctor`: the gain of a running cluster's speculation, its limits, and the remedies."""
