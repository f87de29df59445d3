"""Train the bundled models from Python source text: a target, and drafts distilled from it.

The modules, in the order of the work they do:

    sources, corpus, dialogues   the training text, and the part that is held out
    tokenizer, tokens, streams   byte-level BPE; the corpus as one stream of token ids
    models                       the two model shapes
    batches, trainer, runtime    the one training loop that all models share
    samples, distill             the draft learns the target's distributions, also on the target's own text
    continuation, evaluate       held-out loss and acceptance
    card, export                 Hugging Face folders with their model cards
    workspace, options, context  the files, the user's options, and the steps that stages share
    stages, eagle_stages         the stages, in their order
"""
