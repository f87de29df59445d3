"""`outrider plan cluster`: its options and its measurements."""
