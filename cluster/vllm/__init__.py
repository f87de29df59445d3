"""Code that uses vLLM's internals, for the tested versions of vLLM (`cluster.vllm.compatibility`)."""
