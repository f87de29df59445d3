"""Names that other people's dashboards and pickers look for."""

from __future__ import annotations

# Families that llm-d's picker reads from each pod, with the labels it takes values from.
PICKER = {
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_running": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
# Series that vLLM's dashboards query, all of them by `model_name`.
DASHBOARDS = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_by_source_total",
)
# Series that they query of each engine: of targets' pages.
ENGINES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_num_preemptions_bucket",
    "vllm:num_requests_waiting_by_reason",
)
