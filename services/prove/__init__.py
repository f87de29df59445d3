"""`outrider prove`: measures if speculation pays on these devices, compared with `vllm serve`."""
