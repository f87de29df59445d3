"""`outrider distill`: trains a draft for one target on the target's answers to logged prompts."""
