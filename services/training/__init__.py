"""Trains drafts and heads on logged prompts with their target's answers, for `outrider distill`.

recipe                 the settings of a training, its optimizer and its random numbers
traffic, teaching      logged prompts with the target's answers, and its choices as labels
models, attention      the shapes of models, and attention without masks
traffic_loop           the training loop over answers
traffic_draft          a draft trained on them
parallel               the same for proposals in one step
heads, eagle, medusa   heads that draft from the target's hidden states
traffic_heads          heads trained on answers
log_partition          the loss without keeping all logits
traffic_acceptance     acceptance on held-out answers
"""
