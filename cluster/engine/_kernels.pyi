"""AVX-512 kernels (`kernels/`). Tensors are given by address: contiguous, of the dtypes named in `kernels.h`."""

def linear(x: int, weight: int, y: int, num_rows: int, num_threads: int, /) -> None:
    """`y = x @ weight.T + bias`, where `weight` is a Weight."""

def rms_norm(hidden: int, weight: int, y: int, num_rows: int, size: int, num_threads: int, eps: float, /) -> None:
    """`y = rms_norm(hidden) * weight`."""

def layers(
    model: int,
    hidden: int,
    scratch: int,
    positions: int,
    slots: int,
    row_starts: int,
    context_lens: int,
    block_tables: int,
    paths: int,
    num_rows: int,
    num_segments: int,
    table_len: int,
    path_len: int,
    num_threads: int,
    eps: float,
    /,
) -> None:
    """All layers of `model` (a Model), over a Step; `hidden` is overwritten."""

def scratch_size(model: int, /) -> int:
    """Floats of scratch that `layers` needs for a row."""

def is_supported() -> bool:
    """Whether this processor has the instructions the kernels need."""
