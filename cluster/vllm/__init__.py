"""Everything of ours that touches vLLM's internals, for one version of it (`cluster.vllm.compatibility`)."""
