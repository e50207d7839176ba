"""Log-probabilities and entropy of given tokens from hidden states, without [tokens, vocab] in memory.

Logits exist for one chunk of rows at a time and are computed again in the backward pass; what is kept between
the two is the input and two numbers per token.

Written here because no library that was tried on CPU (2,048 tokens, vocabulary 100K) gives entropy. Besides,
liger's fused GRPO loss (4.9 s, 0.3 GB) is a whole loss and not its log-probabilities, cut-cross-entropy's
compiled path keeps 1 GB, torch's `linear_cross_entropy` takes 32 s, and DeepSpeed's `TiledFusedLogitsLoss`
scales the input's gradient but not the weight's.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 256
"""Rows of logits alive at once."""

VOCAB_BLOCK = 16384
"""Rows of a low-precision weight that are widened to float32 at a time."""


def logprobs_and_entropy(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "vocab d"],
    targets: Int[Tensor, " n"],
    temperature: float,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log softmax(hidden @ weight.T / temperature)[target] and that distribution's entropy (nats), per row.

    Both are differentiable in `hidden` and `weight`, and float32 whatever the inputs (float64 for float64).
    `chunk` rows of logits are alive at once. Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} given, log-probabilities need one above 0")
    return _LinearLogprobs.apply(hidden, weight, targets, temperature, chunk)


class _LinearLogprobs(torch.autograd.Function):
    """With p = softmax(z), z = h W^T / T: d log p_y / dz = e_y - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        logprobs, entropy, lse = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        for a in range(0, len(hidden), chunk):
            s = slice(a, a + chunk)
            z = _logits(hidden[s], weight, temperature)
            # Shifted by the maximum before anything is summed: large logits then lose no digits.
            top = z.amax(-1, keepdim=True)
            z.sub_(top)
            p = z.exp()
            mass = p.sum(-1)
            log_mass = mass.log()
            logprobs[s] = z.gather(1, targets[s, None]).squeeze(1) - log_mass
            entropy[s] = log_mass - p.mul_(z).sum(-1) / mass
            lse[s] = top.squeeze(1) + log_mass
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        g_lp = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        # Rows that the loss does not weigh (observations) cost nothing, and a NaN in them stays where it is.
        used = g_lp != 0 if grad_entropy is None else (g_lp != 0) | (grad_entropy != 0)
        for rows in used.nonzero().squeeze(1).split(ctx.chunk):
            h = hidden[rows]
            log_p = _logits(h, weight, ctx.temperature).sub_(lse[rows, None])
            d = log_p.exp()
            if grad_entropy is None:
                d.mul_(-g_lp[rows, None])
            else:
                d.mul_(log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(g_lp[rows, None]))
            del log_p
            d.scatter_add_(1, targets[rows, None], g_lp[rows, None]).div_(ctx.temperature)
            if d_hidden is not None:
                d_hidden[rows] = _from_logits(d, weight).to(hidden.dtype)
            if d_weight is not None:
                d_weight.addmm_(d.t(), h.to(lse.dtype))
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Float[Tensor, "n d"], weight: Float[Tensor, "vocab d"], temperature: float) -> Tensor:
    """hidden @ weight.T / temperature [n, vocab], in float32 or better.

    A bf16 product would be rounded to three digits before the softmax; so both sides are widened, the weight
    by blocks.
    """
    wide = _wide(hidden.dtype)
    if weight.dtype == wide:
        return (hidden.to(wide) @ weight.t()).div_(temperature)
    z = torch.empty(len(hidden), len(weight), dtype=wide, device=hidden.device)
    h = hidden.to(wide)
    for a in range(0, len(weight), VOCAB_BLOCK):
        torch.mm(h, weight[a : a + VOCAB_BLOCK].to(wide).t(), out=z[:, a : a + VOCAB_BLOCK])
    return z.div_(temperature)


def _from_logits(d: Float[Tensor, "n vocab"], weight: Float[Tensor, "vocab d"]) -> Float[Tensor, "n d"]:
    """d @ weight in d's precision, the weight widened by blocks."""
    if weight.dtype == d.dtype:
        return d @ weight
    out = torch.zeros(len(d), weight.shape[1], dtype=d.dtype, device=d.device)
    for a in range(0, len(weight), VOCAB_BLOCK):
        out.addmm_(d[:, a : a + VOCAB_BLOCK], weight[a : a + VOCAB_BLOCK].to(d.dtype))
    return out
