"""IndexShare in vLLM's own GLM-5.2 model class, where vLLM has no kernel for it: the CPU platform.

vLLM finds `register` through its plugin entry point (`vllm.general_plugins` in pyproject.toml) in every process that
it starts. On a GPU vLLM's native sparse path is left alone.
"""


def register() -> None:
    """Exchange vLLM's MLA wrapper and sparse backend for ours, on the CPU platform. May be called several times."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.custom_op import op_registry_oot

    if "MultiHeadLatentAttentionWrapper" in op_registry_oot:
        return
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "rollout.vllm_plugin.backend.IndexShareBackend")
    from rollout.vllm_plugin.layer import IndexShareWrapper

    MultiHeadLatentAttentionWrapper.register_oot(IndexShareWrapper)
