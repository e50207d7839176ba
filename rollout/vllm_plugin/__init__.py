"""IndexShare in vLLM's own GLM-5.2 model class, where vLLM has no kernel for it.

vLLM finds `register` through its plugin entry point (`vllm.general_plugins` in pyproject.toml) in every process that
it starts. Models that vLLM's own sparse kernels fit keep vLLM's path (`native`).
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Exchange vLLM's MLA wrapper and sparse backend for ours. May be called several times in a process."""
    from vllm.model_executor.custom_op import op_registry_oot

    if "MultiHeadLatentAttentionWrapper" in op_registry_oot:
        return
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm_plugin.backend.IndexShareBackend")
    from rollout.vllm_plugin.layer import IndexShareWrapper

    MultiHeadLatentAttentionWrapper.register_oot(IndexShareWrapper)
    if current_platform.is_cpu():
        _keep_scheduling(type(current_platform))


def _keep_scheduling(platform: Any) -> None:
    """Let IndexShare models have the chunked prefill and the prefix cache that they ask for.

    vLLM's CPU platform switches both off, in silence, for every MLA model, because its own CPU kernels for MLA cannot
    do them. Our backend can.
    """
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache, model = vllm_config.scheduler_config, vllm_config.cache_config, vllm_config.model_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        stock(cls, vllm_config)
        if model is not None and hasattr(model.hf_config, "index_topk"):
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = asked

    platform.check_and_update_config = classmethod(check_and_update_config)
