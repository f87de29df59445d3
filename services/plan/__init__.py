"""`outrider plan cluster`: what is asked, what is measured for it."""
