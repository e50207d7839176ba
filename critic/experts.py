"""The critic's experts: routed MLPs of its own, where no token is ever dropped.

An expert sees one token's state and nothing else. So experts on top of a trunk are computed only where a value is
read, which is exact, and neither prompts nor chunks change what they say.

Weights are float32 and multiplied in `dtype`: they are their own master copy, and the router is float32 throughout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl import expert_parallel

FP16_TOP = 2.0**-4
"""Where the largest gradient entering a float16 product is scaled to. A weight's gradient sums over tokens, and
overflows where tokens times activations pass 2^20; what is 2^20 times smaller than the largest is lost."""


class Routing(NamedTuple):
    """Where tokens went: every expert's probability, and the experts chosen."""

    probabilities: Float[Tensor, "layers tokens experts"]
    chosen: Int[Tensor, "layers tokens top_k"]


class Experts(nn.Module):
    """Top-k of `count` gated MLPs, weighted by their softmax probabilities, which are rescaled to sum to 1."""

    def __init__(
        self, hidden: int, intermediate: int, count: int, top_k: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.dtype = dtype
        self._group: expert_parallel.Group | None = None
        self.router = nn.Parameter(torch.randn(count, hidden) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(count, 2 * intermediate, hidden) * hidden**-0.5)
        # Zero: a new block starts as the identity.
        self.down = nn.Parameter(torch.zeros(count, hidden, intermediate))

    def spread(self, group: str) -> None:
        """Keep this rank's part of the experts; `expert_parallel.exchanged` asks the others. The router stays whole."""
        self._group = expert_parallel.group_named(group)
        self.gate_up = expert_parallel.spread(self.gate_up, group)
        self.down = expert_parallel.spread(self.down, group)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
        """The weighted experts' answers, float32, and who gave them."""
        probabilities = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router))
        if self._group is None:
            answers = self._answers(x[token], counts)
        else:
            answers = expert_parallel.exchanged(x[token], counts, self._answers, self._group)
        answers = answers * weights.flatten()[order, None]
        y = torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, answers)
        return y, Routing(probabilities[None], chosen[None])

    def _answers(self, x: Tensor, counts: Tensor) -> Tensor:
        """Each expert's MLP over its own rows of x, `counts` for each; float32."""
        scale, offsets = _GradientScale(), counts.cumsum(0).int()
        x, gate_up, down = (_lowered(t, self.dtype, scale) for t in (x, self.gate_up, self.down))
        gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=offsets).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets)
        return _Raised.apply(y, scale) if self.dtype == torch.float16 else y.float()


class Norm(nn.RMSNorm):
    """RMS norm in float32, whatever its weight was cast to."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] to the same, float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)


class ExpertBlock(nn.Module):
    """Norm, experts, and the residual around them; in float32 but for the experts' products."""

    def __init__(self, hidden: int, experts: Experts) -> None:
        super().__init__()
        self.norm = Norm(hidden)
        self.experts = experts

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
        """x plus what the experts say of it."""
        y, routing = self.experts(self.norm(x))
        return x + y, routing


class CriticExperts(nn.Module):
    """Expert blocks on top of a trunk, and a norm after them.

    Experts see one state each; what the response was like so far reaches them as the mean of its states, which costs
    the same for every length.
    """

    def __init__(self, hidden: int, blocks: list[ExpertBlock]) -> None:
        super().__init__()
        self.past = nn.Linear(hidden, hidden, bias=False)
        nn.init.zeros_(self.past.weight)
        self.blocks = nn.ModuleList(blocks)
        self.norm = Norm(hidden)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], past: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
        """States that the value head reads, from states and their `running_mean`; float32."""
        x = x + F.linear(F.rms_norm(past, past.shape[-1:], eps=1e-6), self.past.weight.float())
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.norm(x), stacked(routings)


def running_mean(rows: Float[Tensor, "rows hidden"], ends: Int[Tensor, " parts"]) -> Float[Tensor, "rows hidden"]:
    """The mean of a row and those before it in its part; part i ends before row ends[i]."""
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    count = torch.arange(1, max(lengths, default=0) + 1, device=rows.device)[:, None]
    return torch.cat([part.cumsum(0) / count[: len(part)] for part in rows.split(lengths)])


def stacked(routings: list[Routing]) -> Routing:
    """Layers of routing over the same tokens as one."""
    return Routing(torch.cat([r.probabilities for r in routings]), torch.cat([r.chosen for r in routings]))


def expert_counts(routing: Routing, mask: Tensor) -> Float[Tensor, "layers experts"]:
    """How many of the masked tokens' places went to each expert: sums over any split of a step, float64."""
    hot = F.one_hot(routing.chosen[:, mask], routing.probabilities.shape[-1])
    return hot.sum((1, 2)).double()


def balance_loss(routing: Routing, shares: Float[Tensor, "layers experts"]) -> Float[Tensor, " tokens"]:
    """Load-balance loss per token, mean over layers: count * sum_i share_i * probability_i, 1 where all is even.

    The Switch Transformer's, arXiv 2101.03961, eq. 4, whose mean over a step's tokens is the sum of products of two
    means there. `shares` are of the whole optimizer step and carry no gradient, so the rest is a plain sum over
    tokens: the loss is the same for any split into micro-batches and ranks.
    """
    weighted = routing.probabilities * shares.detach().float()[:, None]
    return routing.probabilities.shape[-1] * weighted.sum(-1).mean(0)


class _GradientScale:
    """What one backward pass through a float16 product is scaled by."""

    factor = 1.0


class _Lowered(torch.autograd.Function):
    """To float16; on the way back to float32 and off the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: _GradientScale) -> Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.isfinite(grad).all():
            raise FloatingPointError("a gradient of the critic's experts overflows float16: take bf16 or fp32")
        return grad.to(ctx.dtype) / ctx.scale.factor, None


class _Raised(torch.autograd.Function):
    """To float32; on the way back the gradient is scaled to float16's range, by a power of two: nothing is rounded."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: _GradientScale) -> Tensor:
        ctx.scale = scale
        return y.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        largest = float(grad.abs().max()) if grad.numel() else 0.0
        if 0.0 < largest < math.inf:
            ctx.scale.factor = 2.0 ** math.floor(math.log2(FP16_TOP / largest))
        return (grad * ctx.scale.factor).to(torch.float16), None


def _lowered(x: Tensor, dtype: torch.dtype, scale: _GradientScale) -> Tensor:
    return _Lowered.apply(x, scale) if dtype == torch.float16 else x.to(dtype)
