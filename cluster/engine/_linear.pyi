def linear(
    x: int,
    weight: int,
    y: int,
    num_rows: int,
    in_features: int,
    out_features: int,
    is_bfloat16: int,
    num_threads: int,
    /,
) -> None:
    """`y = x @ weight.T` over contiguous tensors at these addresses, all float32 or all bfloat16."""

def is_supported() -> bool:
    """Whether this processor has the instructions the kernel needs."""
