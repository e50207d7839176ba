"""One Ray actor around one vLLM engine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from indexshare.replay import Recorded
from rl.config import Config
from rl.trajectory import FinishReason, Prompt
from rollout.vllm_plugin.recorder import RECORD

ATTEMPTS = 3
"""How often an aborted request is generated again before it is an error."""


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    prompt_ids: list[int]
    seed: int
    temperature: float
    max_tokens: int
    full_distribution: bool = False
    """Sample from all tokens even where the run truncates (top_p, top_k)."""
    record: bool = False
    """Say what every query of prompt and response selected."""


@dataclass(frozen=True)
class Sampling:
    """What the requests of one call of the pool have in common."""

    run_seed: int
    step: int
    temperature: float

    record: frozenset[tuple[int, int]] = frozenset()
    """(prompt index, sample index) of those whose selection is recorded."""

    def request(self, prompt: Prompt, sample: int, room: int, response: Sequence[int] = (), turn: int = 0) -> Request:
        """The request for at most `room` tokens after the prompt and what there is of the response."""
        seed = request_seed(self.run_seed, self.step, prompt.index, sample, turn)
        record = (prompt.index, sample) in self.record
        return Request([*prompt.ids.tolist(), *response], seed, self.temperature, room, record=record)


def request_seed(run_seed: int, step: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """Sampling seed of one request: what it is asked for decides, not which engine answers."""
    text = f"{run_seed}/{step}/{prompt_index}/{sample_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Sample:
    """What came of a request. `logprobs` are the sampled tokens' own, after temperature, over the full vocabulary."""

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    text: str
    cached_tokens: int
    """Prompt tokens that came out of the prefix cache."""
    selected: Recorded | None = None
    """What Full layers selected, where it was asked for and our backend computed it."""


def environment(config: Config) -> dict[str, str]:
    """What vLLM reads before it is imported."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if config.cluster.device == "cpu":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The first call with log-probabilities would compile for 25 s.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return env


@ray.remote
class Engine:
    """Generates, takes new weights in place, and knows which version it holds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._version = 0

    def load(self) -> None:
        """Start vLLM. Apart from the constructor, so that a failure here still comes from an actor with a node.

        Raises RuntimeError with the cause in one line.
        """
        from vllm import LLM

        r, cluster = self.config.rollout, self.config.cluster
        dtype: Any = r.dtype
        device: dict[str, Any] = {}
        if cluster.device == "gpu":
            device = {"gpu_memory_utilization": r.gpu_memory_utilization}
        try:
            self.llm = LLM(
                self.config.policy.path,
                dtype=dtype,
                seed=0,
                max_model_len=r.max_model_len or self.config.prompts.max_prompt_tokens + r.max_response_tokens,
                max_num_seqs=r.max_num_seqs,
                max_num_batched_tokens=r.max_num_batched_tokens,
                enable_chunked_prefill=True,
                # What comes out of the cache is not selected anew.
                enable_prefix_caching=not self.config.indexshare.replay,
                enforce_eager=cluster.device == "cpu" or self._needs_our_backend(),
                tensor_parallel_size=r.tensor_parallel_size,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # a model's own top_p or penalties must not slip in
                worker_extension_cls="rollout.vllm_plugin.worker.WorkerExtension",
                disable_log_stats=True,
                **device,
            )
        except Exception as error:  # vLLM's and pydantic's run over many lines
            cause = " ".join(str(error).split())
            raise RuntimeError(f"vLLM cannot start on {self.config.policy.path}: {cause}") from error
        self.llm.collective_rpc("prepare")

    def _needs_our_backend(self) -> bool:
        """Our backend loops over requests on the host, which no CUDA graph can hold."""
        import torch
        from transformers import AutoConfig

        from rollout.vllm_plugin.native import fits_native_kernels

        model = AutoConfig.from_pretrained(self.config.policy.path)
        dtype = getattr(torch, self.config.rollout.dtype)
        return model.model_type == "glm_moe_dsa" and not fits_native_kernels(model, dtype)

    def node(self) -> str:
        """Where this engine lives."""
        return ray.util.get_node_ip_address()

    def version(self) -> int:
        """The weights' version; 0 is the model's folder."""
        return self._version

    def pid(self) -> int:
        """The actor's process, for tests that kill it."""
        return os.getpid()

    def generate(self, requests: list[Request]) -> list[Sample]:
        """One sample per request, in their order. Raises RuntimeError for requests that keep being aborted."""
        return complete(self._generate, requests)

    def _generate(self, requests: list[Request]) -> list[Sample | None]:
        from vllm import SamplingParams

        r = self.config.rollout
        parameters = [
            SamplingParams(
                temperature=q.temperature,
                top_p=1.0 if q.full_distribution else r.top_p,
                top_k=0 if q.full_distribution else r.top_k,
                max_tokens=q.max_tokens,
                seed=q.seed,
                logprobs=0,
                detokenize=False,
                extra_args={RECORD: i} if q.record else None,
            )
            for i, q in enumerate(requests)
        ]
        prompts: Any = [{"prompt_token_ids": q.prompt_ids} for q in requests]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        tokenizer: Any = self.llm.get_tokenizer()
        for o in outputs:
            # Once for the whole response: vLLM's own way decodes token by token, and each sampled token again.
            o.outputs[0].text = tokenizer.decode(
                o.outputs[0].token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        recorded = self.llm.collective_rpc("recorded")[0] if any(q.record for q in requests) else {}
        return [sample_of(o, recorded.get(i)) for i, o in enumerate(outputs)]

    def update_weights(self, weights: dict[str, Any], version: int) -> str:
        """Load weights (names of the checkpoint) in place; returns the checksum of what vLLM's worker received.

        Cached prompts belong to the old weights and are dropped. Names and shapes are the caller's to check.
        """
        received = set(self.llm.collective_rpc("receive_weights", args=(list(weights.items()),)))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("prompts of the old weights are still in the prefix cache")
        self._version = version
        return " and ".join(sorted(received))  # one value, unless tensor-parallel ranks received different bytes


def complete(generate: Callable[[list[Request]], list[Sample | None]], requests: Sequence[Request]) -> list[Sample]:
    """One sample per request, in their order; what `generate` aborted (None) it is asked for again."""
    samples: dict[int, Sample] = {}
    for _ in range(ATTEMPTS):
        missing = [i for i in range(len(requests)) if i not in samples]
        if not missing:
            break
        results = generate([requests[i] for i in missing])
        samples |= {i: s for i, s in zip(missing, results, strict=True) if s is not None}
    if len(samples) < len(requests):
        raise RuntimeError(f"{len(requests) - len(samples)} of {len(requests)} requests were aborted {ATTEMPTS} times")
    return [samples[i] for i in range(len(requests))]


def sample_of(request_output: Any, selected: Recorded | None = None) -> Sample | None:
    """What vLLM returned for a request; None where it was aborted."""
    output = request_output.outputs[0]
    if output.finish_reason not in ("stop", "length"):
        return None
    # vLLM may list better tokens beside the sampled one: take the sampled one's.
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    return Sample(
        ids=np.array(output.token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=output.finish_reason,
        text=output.text,
        cached_tokens=request_output.num_cached_tokens or 0,
        selected=selected,
    )
