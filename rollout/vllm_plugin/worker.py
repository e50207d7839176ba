"""What vLLM's worker must do for us: take new weights and say what it received."""

from __future__ import annotations

from typing import Any

import torch

from rollout.weights import checksum


def repack(model: Any) -> None:
    """Redo what vLLM's in-place reload forgets on CPU: matrices packed for its kernels keep the old weights."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    @torch.no_grad()
    def receive_weights(self, named: list[tuple[str, torch.Tensor]]) -> str:
        """Load the weights in place; returns the checksum of the tensors as they arrived here."""
        from vllm.platforms import current_platform

        received = checksum(named)
        self.reload_weights(weights_iterator=iter(named))  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            repack(self.model_runner.model)  # type: ignore[attr-defined]
        return received
