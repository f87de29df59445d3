"""`outrider chat`: a conversation in the terminal that shows how its answers were made."""
