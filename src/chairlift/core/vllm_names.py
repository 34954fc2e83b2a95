"""Our name for each setting of vLLM, or the reason for its absence, for errors of `LLM(...)` and the command line."""

from __future__ import annotations

# vLLM's setting -> ours.
RENAMED = {
    "async_scheduling": "overlap",
    "enable_prefix_caching": "prefix_cache",
    "gpu_memory_utilization": "memory_share",
    "kv_cache_dtype": "kv_dtype",
    "max_model_len": "max_length",
    "max_num_batched_tokens": "step_tokens",
    "max_num_seqs": "max_sequences",
    "preemption_mode": "preemption",
    "scheduling_policy": "policy",
    "tensor_parallel_size": "tensor_parallel",
}

# vLLM's flags of `serve` that are not engine settings -> ours.
RENAMED_FLAGS = {
    "allowed_origins": "cors_origin",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "uvicorn_log_level": "log_level",
}

_RANKS = "a model is divided over devices by tensor_parallel alone"
_NO_ADAPTERS = "LoRA adapters are not supported"
_NO_CODE = "a model's own code is never run"
_RECORDED = "steps are captured as CUDA graphs wherever possible"
_FROM_FILES = "it is read from the model's files"
_TEXT_ONLY = "models read text only"
_DRAFTS = "use speculation, draft and max_drafts; how many drafts a step checks is chosen as it runs"
_NO_GRAMMARS = "structured output is not supported"
_NO_TOOLS = "tool calls are not supported"

# vLLM's setting -> why there is none here.
ABSENT = {
    "allowed_local_media_path": _TEXT_ONLY,
    "attention_backend": "the device determines the kernels",
    "block_manager": "there is one block manager",
    "chat_template": "the model's own template is used, or one given with a call, as in chat(..., chat_template=...)",
    "code_revision": _NO_CODE,
    "compilation_config": _RECORDED,
    "config_format": _FROM_FILES,
    "cpu_offload_gb": "weights stay on the device; use a smaller or a quantized model",
    "cuda_graph_sizes": _RECORDED,
    "data_parallel_size": "start one server for each GPU",
    "decode_context_parallel_size": _RANKS,
    "disable_async_output_proc": "use overlap=False to run step by step",
    "disable_cascade_attn": "use shared_reads=False to read a shared prefix once per sequence",
    "disable_custom_all_reduce": _RANKS,
    "disable_log_requests": "use log_level",
    "disable_log_stats": "statistics are metrics, which a server exposes at /metrics",
    "disable_sliding_window": _FROM_FILES,
    "distributed_executor_backend": _RANKS,
    "download_dir": "models are kept under HF_HOME",
    "enable_auto_tool_choice": _NO_TOOLS,
    "enable_chunked_prefill": "prompts are chunked; prefill='whole' computes each in one step",
    "enable_expert_parallel": _RANKS,
    "enable_lora": _NO_ADAPTERS,
    "enable_prompt_embeds": _TEXT_ONLY,
    "enable_sleep_mode": "memory is freed when the process ends",
    "enforce_eager": _RECORDED,
    "guided_decoding_backend": _NO_GRAMMARS,
    "hf_overrides": _FROM_FILES,
    "hf_token": "set HF_TOKEN in the environment",
    "ignore_patterns": "only the files that are needed are fetched",
    "kv_transfer_config": "prefill and decode run in one engine",
    "limit_mm_per_prompt": _TEXT_ONLY,
    "logits_processor_pattern": "logits processors are given in process, as SamplingParams(logits_processors=...)",
    "logits_processors": "give them with a request, as SamplingParams(logits_processors=...)",
    "max_logprobs": "a request may ask for up to 64 alternatives, in process for all of them (-1)",
    "max_lora_rank": _NO_ADAPTERS,
    "max_loras": _NO_ADAPTERS,
    "max_num_partial_prefills": "prompts share the tokens of a step that decodes do not use; see step_tokens",
    "max_parallel_loading_workers": "weights are read by one process",
    "max_seq_len_to_capture": _RECORDED,
    "mm_processor_kwargs": _TEXT_ONLY,
    "model_loader_extra_config": "weights are read from safetensors or GGUF",
    "num_gpu_blocks_override": "use kv_tokens, the number of tokens that the KV cache holds",
    "num_lookahead_slots": _DRAFTS,
    "num_scheduler_steps": "a step is planned while the previous one runs; see overlap",
    "override_generation_config": "give SamplingParams; generation_config='none' ignores the model's own values",
    "pipeline_parallel_size": _RANKS,
    "prefix_caching_hash_algo": "the prefix cache compares tokens and has no hash",
    "reasoning_parser": "reasoning is not separated from the answer",
    "revision": "download the revision and name its folder",
    "runner": "models generate text",
    "scheduler_delay_factor": "admission depends on free memory alone",
    "skip_tokenizer_init": "give prompts as token ids, and SamplingParams(detokenize=False)",
    "speculative_config": _DRAFTS,
    "speculative_model": _DRAFTS,
    "swap_space": "use host_tokens, the number of tokens kept in host memory, with preemption='swap'",
    "task": "models generate text",
    "tokenizer": "a model is read with its own tokenizer",
    "tokenizer_mode": "a model is read with its own tokenizer",
    "tokenizer_revision": "a model is read with its own tokenizer",
    "tool_call_parser": _NO_TOOLS,
    "trust_remote_code": _NO_CODE,
    "worker_cls": _RANKS,
}


def setting_hint(name: str) -> str | None:
    """Return what to use instead of a setting of vLLM; None for a name that vLLM does not have.

    >>> setting_hint("max_model_len"), setting_hint("hf_token")
    ('max_model_len is called max_length here', 'there is no hf_token here: set HF_TOKEN in the environment')
    """
    if name in RENAMED:
        return f"{name} is called {RENAMED[name]} here"
    return f"there is no {name} here: {ABSENT[name]}" if name in ABSENT else None


def flag_hint(flag: str) -> str | None:
    """Return what to use instead of a flag of vLLM's command line, with or without its leading dashes.

    >>> flag_hint("--max-model-len"), flag_hint("--no-enable-prefix-caching"), flag_hint("--nonsense")
    ('--max-model-len is called --max-length here', '--enable-prefix-caching is called --prefix-cache here', None)
    """
    name = flag.lstrip("-").partition("=")[0].removeprefix("no-").replace("-", "_")
    renamed = (RENAMED | RENAMED_FLAGS).get(name)
    shown = "--" + name.replace("_", "-")
    if renamed is not None:
        return f"{shown} is called --{renamed.replace('_', '-')} here"
    return f"there is no {shown} here: {ABSENT[name]}" if name in ABSENT else None
