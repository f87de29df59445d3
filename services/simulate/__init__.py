"""The command `outrider simulate`."""
