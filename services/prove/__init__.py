"""`outrider prove`: measures on the devices at hand whether speculation pays, next to `vllm serve`, and reports it."""
