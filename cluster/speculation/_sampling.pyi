"""The kernel that draws (`kernels/`)."""

def draw(runs: bytes, vocab_size: int, width: int, ids: int, scores: int, /) -> None:
    """The best `width` tokens of every row of `runs` (Runs of `sampling.h`), written to the addresses given."""
