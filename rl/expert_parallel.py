"""Expert parallelism: parameters of which every rank holds a part of the experts.

Groups, and how such a parameter is marked, are DeepSpeed's: its engine then sums a gradient only over the ranks that
hold the same experts. DeepSpeed's own MoE layer is not used, because it dispatches through a dense [tokens, experts,
capacity]; here rows travel in parts of unequal size, of which none is padded or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

Group = dist.ProcessGroup


def create_group(size: int) -> str:
    """The name of the groups of `size` neighbouring ranks over which experts are spread (a collective of all ranks)."""
    from deepspeed.utils import groups

    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    return name


def group_named(name: str) -> Group:
    """This rank's group of that name."""
    from deepspeed.utils import groups

    return groups._get_expert_parallel_group(name)


def spread(whole: nn.Parameter, name: str) -> nn.Parameter:
    """This rank's part of a parameter [experts, ...] that all ranks hold alike."""
    group = group_named(name)
    own = whole.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
    part: Any = nn.Parameter(own.clone(), requires_grad=whole.requires_grad)
    part.allreduce, part.group_name = False, name
    return part


def is_spread(parameter: nn.Parameter) -> bool:
    """Whether other ranks hold other experts of it."""
    return hasattr(parameter, "group_name")


def ranks_of(parameter: Any) -> int:
    """Over how many ranks a parameter is spread: 1 if it is not."""
    return dist.get_world_size(group_named(parameter.group_name)) if is_spread(parameter) else 1


def gathered(parameter: Any) -> Tensor:
    """The whole of a parameter that is spread (a collective of its group)."""
    group = group_named(parameter.group_name)
    parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, parameter.detach().contiguous(), group=group)
    return torch.cat(parts)


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients to at most `max_norm`, counting every expert once; returns the norm before.

    A collective where parameters are spread, which then all are over the same group.
    """
    spread_out: list[Any] = [p for p in parameters if is_spread(p)]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and not is_spread(p)])
    if spread_out:
        square = nn.utils.get_total_norm([p.grad for p in spread_out if p.grad is not None]).square()
        dist.all_reduce(square, group=group_named(spread_out[0].group_name))
        norm = (norm.square() + square).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def exchanged(
    rows: Float[Tensor, "rows hidden"],
    counts: Int[Tensor, " experts"],
    answer: Callable[[Tensor, Tensor], Tensor],
    group: Group,
) -> Float[Tensor, "rows hidden"]:
    """What all the group's experts answer to rows that lie expert by expert, `counts` for each.

    `answer` gets rows of this rank's experts in the same form. Every rank of the group must call, also in backward.
    """
    ranks = dist.get_world_size(group)
    sent = counts.view(ranks, -1).contiguous()
    received = torch.empty_like(sent)  # [rank they come from, own expert]
    dist.all_to_all_single(received, sent, group=group)
    give, take = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = all_to_all_single_autograd(rows.contiguous(), take, give, group)
    expert = torch.arange(received.shape[1], device=rows.device).repeat(ranks)
    order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
    answers = answer(arrived[order], received.sum(0)) if len(order) else arrived.float()
    back = answers[order.argsort()]
    return all_to_all_single_autograd(back, give, take, group)
