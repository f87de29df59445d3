"""`outrider distill`: a draft for one target, taught on the answers that it gives to logged prompts."""
