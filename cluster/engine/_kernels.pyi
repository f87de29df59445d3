"""The kernels for CPUs (`kernels/`). Tensors are given by address: contiguous, of the dtypes named in `kernels.h`."""

def linear(x: int, weight: int, y: int, scratch: int, num_rows: int, num_threads: int, /) -> None:
    """`y = x @ weight.T + bias`, where `weight` is a Weight."""

def linear_scratch_size(weight: int, /) -> int:
    """Floats of scratch that `linear` needs for a row."""

def decode(
    model: int,
    logits: int,
    scratch: int,
    token_ids: int,
    logit_rows: int,
    positions: int,
    slots: int,
    row_starts: int,
    prefix_lens: int,
    block_tables: int,
    paths: int,
    num_rows: int,
    num_logit_rows: int,
    num_segments: int,
    table_len: int,
    path_len: int,
    num_threads: int,
    residual: int,
    attention_input: int,
    eps: float,
    /,
) -> None:
    """A forward pass of `model` (a Model) over a Step."""

def scratch_size(model: int, /) -> int:
    """Floats of scratch that `decode` needs for a row."""

def is_supported(instruction_set: int, /) -> bool:
    """Whether this processor has an InstructionSet, and the kernels were built for it."""

def use_lanes(lanes: int, /) -> bool:
    """Sets the width of registers of the portable kernels, in lanes (0: the best).

    Returns False, and changes nothing, if this processor has none of that width.
    """

def cos_sin(angles: int, count: int, cos: int, sin: int, /) -> None:
    """The cosines and sines of float32 angles, rounded once, into float32."""
