"""The corpus in the tokens of the workspace's tokenizer: one stream for each split."""

from bench.factory.corpus import size_of
from bench.factory.tokens import encode_documents
from bench.factory.workspace import Workspace, read_documents, write_array, write_json


def write_streams(workspace: Workspace) -> None:
    """Encode both splits, and write their streams, then the facts about them."""
    serialized = (workspace.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    facts = {}
    for split in ("train", "held_out"):
        documents = read_documents(workspace.documents(split))
        stream = encode_documents(serialized, documents)
        write_array(workspace.stream(split), stream)
        facts[split] = size_of(documents) | {"tokens": len(stream)}
    write_json(workspace.token_facts, facts)
