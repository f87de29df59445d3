"""The pair's tokenizer: byte-level BPE over 4,096 tokens, and a ChatML-like chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
END_OF_TEXT_ID = SPECIAL_TOKENS.index(END_OF_TEXT)
IM_END_ID = SPECIAL_TOKENS.index(IM_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Words with the one character before them, short numbers, punctuation with the line ends after it, and runs of spaces.
# An indentation is one piece without its last space, which belongs to the word after it.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str], model_max_length: int, vocabulary_size: int = VOCABULARY_SIZE
) -> PreTrainedTokenizerFast:
    """Train on ``texts``. Raises ValueError if they are too few to fill the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"the sample gives {tokenizer.get_vocab_size()} tokens, not {vocabulary_size}: "
            "train the tokenizer on more text"
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face tokenizer folder that older releases of transformers can load, too."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # The class name that every release can load; newer releases write an alias.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer
