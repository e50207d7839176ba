"""What vLLM's worker must do for us: take new weights, say what it received, and keep seeds through long prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from indexshare.replay import Recorded
from rollout.vllm_plugin.recorder import Recorder
from rollout.weights import checksum


def repack(model: Any) -> None:
    """Redo what vLLM's in-place reload forgets on CPU: matrices packed for its kernels keep the old weights."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            quant_method: Any = module.quant_method
            quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def hold_seeds_during_prefill(runner: Any) -> None:
    """Let seeded requests be prefilled in chunks on CPU.

    After each chunk vLLM samples a token, throws it away and turns the request's generator back by a CUDA offset,
    which a CPU generator does not have (RuntimeError). Hidden from the sampler while its prompt is unfinished, a
    generator stays where it was, so that a sample does not depend on how its prompt was cut.
    """
    stock = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        generators = runner.input_batch.generators
        unfinished = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
        held = {i: generators.pop(i) for i in unfinished if i in generators}
        try:
            return stock(grammar_output)
        finally:
            generators.update(held)

    runner.sample_tokens = sample_tokens


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def prepare(self) -> None:
        """Once, after vLLM has started."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            hold_seeds_during_prefill(self.model_runner)  # type: ignore[attr-defined]
        self._recorder = Recorder(self.model_runner)  # type: ignore[attr-defined]

    def recorded(self) -> dict[int, Recorded]:
        """What the requests that asked for it selected since the last call, by the number that they gave."""
        return self._recorder.take()

    @torch.no_grad()
    def receive_weights(self, named: list[tuple[str, torch.Tensor]]) -> str:
        """Load the weights in place; returns the checksum of the tensors as they arrived here."""
        from vllm.platforms import current_platform

        received = checksum(named)
        self.reload_weights(weights_iterator=iter(named))  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            repack(self.model_runner.model)  # type: ignore[attr-defined]
        return received
