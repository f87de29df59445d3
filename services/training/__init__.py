"""Train the bundled pair of models from Python source text: a target, and a draft distilled from it.

The modules, in the order of the work they do:

    sources, corpus, dialogues   which text, and which of it is held out
    tokenizer, tokens, streams   byte-level BPE; the corpus as one stream of token ids
    models, attention            the two model shapes
    batches, trainer, runtime    the one training loop that all models share
    samples, distill             the draft learns the target's distributions, also on the target's own text
    eagle                        a head that drafts from the target's hidden states, for vLLM
    generation, evaluate         held-out loss and acceptance
    card, export                 Hugging Face folders with their model cards
    workspace, options, context  what is kept where, what a user decides, what stages share
    stages, eagle_stages         in which order it is made

This package imports nothing heavy by itself: ``corpus.held_out_texts`` works without torch.
"""
