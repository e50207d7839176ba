"""The DeepSpeed learner that policy and critic share: micro-batches in, one optimizer step, state.

What differs between the two (the module, its loss) is passed in; everything about distribution, precision and
accumulation is here once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
from torch import nn
from torch.utils._pytree import tree_map

from rl import expert_parallel
from rl.config import ClusterConfig, Config, DeepSpeedConfig, OptimizerConfig
from rl.trajectory import Batch, Trajectory, microbatches, pack


@dataclass
class Stats:
    """What an optimizer step measured: sums over action tokens, and extremes. Merging is exact for any split."""

    sums: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def merge(self, other: Stats) -> Stats:
        """Both together."""
        return Stats(
            {k: self.sums.get(k, 0.0) + other.sums.get(k, 0.0) for k in self.sums | other.sums},
            {k: min(self.minima.get(k, v), other.minima.get(k, v)) for k, v in (self.minima | other.minima).items()},
            {k: max(self.maxima.get(k, v), other.maxima.get(k, v)) for k, v in (self.maxima | other.maxima).items()},
        )

    def means(self) -> dict[str, float]:
        """Every sum over the number of action tokens (`tokens`), and the extremes as they are."""
        tokens = max(self.sums.get("tokens", 0.0), 1.0)
        means = {k: v / tokens for k, v in self.sums.items() if k != "tokens"}
        return means | self.minima | self.maxima


def token_stats(
    mask: torch.Tensor,
    means: Mapping[str, torch.Tensor],
    minima: Mapping[str, torch.Tensor] | None = None,
    maxima: Mapping[str, torch.Tensor] | None = None,
) -> Stats:
    """`Stats` of per-token tensors [tokens] over the mask."""

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x.detach()[mask].double()

    count = int(mask.sum())
    stats = Stats({"tokens": float(count)} | {k: float(pick(v).sum()) for k, v in means.items()})
    if count:
        stats.minima = {k: float(pick(v).min()) for k, v in (minima or {}).items()}
        stats.maxima = {k: float(pick(v).max()) for k, v in (maxima or {}).items()}
    return stats


LossFunction = Callable[[nn.Module, Batch], tuple[torch.Tensor, Stats]]
"""Module and micro-batch to (its share of the optimizer step's loss, what it measured)."""


def init_process_group(rank: int, ranks: int, host: str, port: int, cluster: ClusterConfig) -> None:
    """Join the role's DeepSpeed process group (gloo on CPU, NCCL on GPU)."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(cluster.threads)
    import deepspeed

    if cluster.device == "cpu":
        # DeepSpeed would compile a shared-memory op that training never uses: minutes, and a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if cluster.device == "cpu" else "nccl", verbose=False)


def free_port() -> int:
    """A port of this node that is free now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def disable_dropout(module: nn.Module) -> None:
    """A ratio compares two passes of the same network: dropout would make it noise, whatever the model's config."""
    for m in module.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(getattr(m, "attention_dropout", None), float):
            m.attention_dropout = 0.0  # type: ignore[assignment]


def _deepspeed_config(ds: DeepSpeedConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": ds.zero_stage}
    if ds.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        # A step's micro-batches are cut by tokens, so their number is ours to say: `step()` is the boundary.
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimizer.max_grad_norm if ds.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": ds.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1 << 62,
    }


class Passed:
    """A module that passes a micro-batch once: the first call answers without gradient, the next with that pass'."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._output: Any = None

    def __call__(self, batch: Batch) -> Any:
        if self._output is not None:
            return self._output
        with torch.enable_grad():
            self._output = self._module(batch)
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, self._output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Learner:
    """A module under DeepSpeed.

    Gradients of a step are the plain sum over micro-batches and ranks: a loss function returns its share, already
    weighted by the step's single denominator.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig,
        ds: DeepSpeedConfig,
        tokens_per_microbatch: int,
        device: str = "cpu",
    ) -> None:
        import deepspeed

        self._tokens = tokens_per_microbatch
        self._device = device
        self._base_lr = optimizer.lr
        self._stage = ds.zero_stage
        disable_dropout(module)
        module.train()  # gradient checkpointing of transformers is off in eval mode
        trained = [p for p in module.parameters() if p.requires_grad]
        adam: Any = deepspeed.ops.adam.DeepSpeedCPUAdam if ds.offload else partial(torch.optim.AdamW, fused=True)
        betas, decay = (optimizer.betas[0], optimizer.betas[1]), optimizer.weight_decay
        self.engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=adam(trained, lr=optimizer.lr, betas=betas, weight_decay=decay),
            config=_deepspeed_config(ds, optimizer),
        )
        self._norm = 0.0
        if not self._stage:
            # DeepSpeed's stage 0 clips without saying the norm; before the optimizer's step gradients are reduced.
            self._optimizer.register_step_pre_hook(
                lambda *_: setattr(self, "_norm", expert_parallel.clip_grad_norm(trained, optimizer.max_grad_norm))
            )
        self._spread = {n: p for n, p in module.named_parameters() if expert_parallel.is_spread(p)}
        self.engine.has_moe_layers = bool(self._spread)
        self._ranks = torch.distributed.get_world_size()
        self._kept: tuple[list[Trajectory], nn.Module] | None = None

    @property
    def module(self) -> nn.Module:
        """The trained module, without DeepSpeed's wrapper."""
        return self.engine.module

    def step(self, trajectories: Sequence[Trajectory], loss: LossFunction, lr_factor: float) -> tuple[Stats, float]:
        """One optimizer step over this rank's trajectories. Returns what was measured here and the gradient's norm.

        Raises FloatingPointError when the gradient is not finite; the weights are then as they were.
        """
        trajectories, module = self._passed(trajectories)
        batches = [pack(b, self._device) for b in microbatches(trajectories, self._tokens)]
        for group in self._optimizer.param_groups:
            group["lr"] = self._base_lr * lr_factor
        stats = Stats()
        for batch, counts in self._in_step(batches):
            value, measured = loss(module, batch)
            if not torch.isfinite(value):
                raise FloatingPointError("the loss is not finite")
            # DeepSpeed averages over ranks; the denominator already covers all of them.
            self.engine.backward(value * (self._ranks if counts else 0.0), scale_wrt_gas=False)
            if counts:
                stats = stats.merge(measured)
        self.engine.step()
        return stats, float(self.engine.get_global_grad_norm()) if self._stage else self._norm

    def _in_step(self, batches: list[Batch]) -> list[tuple[Batch, bool]]:
        """The micro-batches, repeated without weight up to the largest number of any rank.

        Every rank must take part in the same collectives, which stages 2 and 3 run once per backward.
        """
        longest = len(batches)
        if self._ranks > 1:
            count = torch.tensor(longest, device=self._device)
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
            longest = int(count)
        if longest and not batches:
            raise ValueError("a rank got no trajectory: fewer trajectories per optimizer step than ranks")
        return [(b, True) for b in batches] + [(batches[0], False)] * (longest - len(batches))

    @torch.no_grad()
    def forward(
        self,
        trajectories: Sequence[Trajectory],
        function: Callable[[nn.Module, Batch], Any],
        *,
        then_step: bool = False,
    ) -> list[Any]:
        """`function` over this rank's micro-batches, without gradient, in the trajectories' order.

        `then_step` announces that the next optimizer step is over these trajectories. Where one micro-batch holds them
        all, the pass is then the step's own, and is kept for it instead of being computed twice. `function` may call
        the module once.
        """
        self._kept = None
        batches = [pack(b, self._device) for b in microbatches(trajectories, self._tokens)]
        if then_step and len(batches) == 1 and self._ranks == 1 and self._stage < 3:
            passed = cast(nn.Module, Passed(self.engine))
            self._kept = list(trajectories), passed
            return [function(passed, batches[0])]
        results = [(function(self.engine, b), counts) for b, counts in self._in_step(batches)]
        return [r for r, counts in results if counts]

    def _passed(self, trajectories: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], nn.Module]:
        """The trajectories in the order of the pass that is kept for them, with that pass; or as they are."""
        kept, self._kept = self._kept, None
        if kept is not None:
            given = {(t.prompt_index, t.sample_index): t for t in trajectories}
            order = [(t.prompt_index, t.sample_index) for t in kept[0]]
            if given.keys() == set(order):
                return [given[key] for key in order], kept[1]
        return trajectories, self.engine

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers on CPU, gathered (a collective under ZeRO 3)."""
        import deepspeed

        parameters = list(self.module.parameters()) if self._stage == 3 else []
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
            state = {k: v.detach().to("cpu", copy=True) for k, v in self.module.state_dict().items()}
        return state | {k: expert_parallel.gathered(p).cpu() for k, p in self._spread.items()}

    def save(self, directory: str) -> None:
        """Weights and optimizer, one file per rank (a collective)."""
        if self._spread:
            # DeepSpeed would look for its own MoE layers. At stage 0 there is no more than this.
            Path(directory).mkdir(parents=True, exist_ok=True)
            state = {"module": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, self._rank_file(directory))
            return
        self.engine.save_checkpoint(directory, tag="state", save_latest=False)

    def load(self, directory: str) -> None:
        """What `save` wrote. Raises FileNotFoundError."""
        self._kept = None
        if self._spread:
            state = torch.load(self._rank_file(directory), map_location=self._device)
            self.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            return
        path, _ = self.engine.load_checkpoint(directory, tag="state")
        if path is None:
            raise FileNotFoundError(f"no checkpoint in {directory}")

    @staticmethod
    def _rank_file(directory: str) -> Path:
        return Path(directory) / f"rank{torch.distributed.get_rank()}.pt"


class LearnerWorker:
    """The Ray actor around a `Learner`, one per rank; a role adds `build` and `loss`."""

    def __init__(self, config: Config, rank: int, ranks: int) -> None:
        self.config = config
        self.rank = rank
        self.ranks = ranks
        self.device = "cuda" if config.cluster.device == "gpu" else "cpu"
        self.learner: Learner

    def build(self) -> tuple[nn.Module, OptimizerConfig, DeepSpeedConfig]:
        """The module to train, its optimizer and how DeepSpeed runs it."""
        raise NotImplementedError

    def loss(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Stats]:
        """See `LossFunction`."""
        raise NotImplementedError

    def node(self) -> str:
        """Where this actor lives."""
        return ray.util.get_node_ip_address()

    def pid(self) -> int:
        """This actor's process."""
        return os.getpid()

    def address(self) -> tuple[str, int]:
        """Where rank 0 will gather the others."""
        return self.node(), free_port()

    def setup(self, host: str, port: int) -> dict[str, int]:
        """Join the role's ranks and build the learner (a collective). Returns parameter counts."""
        init_process_group(self.rank, self.ranks, host, port, self.config.cluster)
        torch.manual_seed(self.config.run.seed)  # new heads and adapters must be equal on every rank
        module, optimizer, ds = self.build()
        self.learner = Learner(module, optimizer, ds, self.config.step.tokens_per_microbatch, self.device)
        counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
        return {"parameters": sum(n for n, _ in counts), "trained": sum(n for n, t in counts if t)}

    def update(self, trajectories: list[Trajectory], lr_factor: float) -> tuple[Stats, float]:
        """One optimizer step over this rank's share. Returns what it measured and the gradient's norm."""
        return self.learner.step(trajectories, self.loss, lr_factor)

    def save(self, directory: str) -> None:
        """This rank's part of a checkpoint (a collective)."""
        self.learner.save(directory)

    def load(self, directory: str) -> None:
        """What `save` wrote."""
        self.learner.load(directory)

    def peak_memory(self) -> float:
        """Largest resident memory of this process so far, in GiB."""
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def per_response(batch: Batch, values: torch.Tensor) -> list[np.ndarray]:
    """Cut a tensor over all response tokens of a pack into one float32 array per trajectory."""
    lengths = torch.bincount(batch.trajectory, minlength=len(batch.last)).tolist()
    return [part.float().cpu().numpy() for part in values.split(lengths)]
