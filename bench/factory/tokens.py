"""The corpus as one stream of token ids, documents separated by the end-of-text token."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from bench.factory.corpus import Document
from bench.factory.tokenizer import END_OF_TEXT_ID

TokenArray = NDArray[np.uint16]
_DOCUMENTS_AT_ONCE = 512


def sample_texts(documents: Sequence[Document], limit_bytes: int) -> Iterator[str]:
    """Yield whole texts, at most ``limit_bytes`` in all, in a fixed pseudo-random order.

    Dialogues are left out.
    """
    order = sorted(documents, key=lambda d: hashlib.sha256(d.path.encode()).digest())
    for document in order:
        if document.is_dialogue:
            continue
        limit_bytes -= len(document.text.encode())
        if limit_bytes < 0:
            return
        yield document.text


def encode_documents(serialized_tokenizer: str, documents: Sequence[Document]) -> TokenArray:
    """Encode and join documents. Each is followed by the end-of-text token.

    ``serialized_tokenizer`` is the content of a tokenizer.json. Text that merely looks like a special
    token is encoded as ordinary bytes, except in dialogues, which are made of special tokens.
    """
    verbatim = Tokenizer.from_str(serialized_tokenizer)
    verbatim.encode_special_tokens = True
    with_markers = Tokenizer.from_str(serialized_tokenizer)
    pieces: list[TokenArray] = []
    progress = tqdm(total=len(documents), desc="encode", unit=" documents", mininterval=5)
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        batch = documents[start : start + _DOCUMENTS_AT_ONCE]
        for is_dialogue, encoder in ((False, verbatim), (True, with_markers)):
            texts = [d.text for d in batch if d.is_dialogue == is_dialogue]
            for encoding in encoder.encode_batch_fast(texts):
                pieces.append(np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
        progress.update(len(batch))
    progress.close()
    return np.concatenate(pieces)
