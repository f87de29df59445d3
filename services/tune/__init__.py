"""`outrider tune`: tries the settings that the doctor suspects, on the cluster itself, and writes the faster ones."""
