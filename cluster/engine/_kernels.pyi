"""AVX-512 kernels (`kernels/`). Tensors are given by address: contiguous, of the dtypes named in `kernels.h`."""

def linear(
    x: int,
    panels: int,
    scales: int,
    y: int,
    num_rows: int,
    in_features: int,
    out_features: int,
    group_size: int,
    format: int,
    num_threads: int,
    /,
) -> None:
    """`y = x @ weight.T`, the weight in panels; `format` is that of its numbers."""

def attention(
    qkv: int,
    keys: int,
    values: int,
    y: int,
    row_starts: int,
    context_lens: int,
    block_tables: int,
    positions: int,
    paths: int,
    path_len: int,
    num_segments: int,
    table_len: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    span: int,
    is_bfloat16: int,
    num_threads: int,
    /,
) -> None:
    """Causal attention of every segment over its paged context, of each row over the last `span` positions."""

def add_rms_norm(
    hidden: int,
    delta: int,
    weight: int,
    y: int,
    num_rows: int,
    size: int,
    num_threads: int,
    eps: float,
    /,
) -> None:
    """`hidden += delta` (unless its address is 0), then `y = rms_norm(hidden) * weight`."""

def silu_and_mul(x: int, y: int, num_rows: int, size: int, num_threads: int, /) -> None:
    """`y = silu(gate) * up`, where a row of `x` is gate, then up."""

def rotate_and_store(
    qkv: int,
    norm: int,
    cos: int,
    sin: int,
    positions: int,
    slots: int,
    keys: int,
    values: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_bfloat16: int,
    num_threads: int,
    eps: float,
    /,
) -> None:
    """Norms each query and key (unless the address of the weights is 0) and rotates it, queries in place.

    Stores the keys, and the values as they are, in the rows' slots.
    """

def is_supported() -> bool:
    """Whether this processor has the instructions the kernels need."""
