"""All code that uses vLLM's internals, for one version of vLLM (`cluster.vllm.compatibility`)."""
