"""vLLM itself with our sampling and our drafts, on its V2 model runner: `vllm serve` with a plugin, no worker of ours.

Experimental: tried with Triton's interpreter on a CPU, not on a GPU.
"""
