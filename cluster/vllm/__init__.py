"""All code that uses vLLM's internals, for some versions of vLLM (`cluster.vllm.compatibility`)."""
