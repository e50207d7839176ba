"""What travels: prompts in, trajectories out, packed micro-batches on a worker.

Nothing here is padded. A micro-batch is trajectories laid end to end, and every per-response array of a batch
is laid end to end in the same order, so a mask is the only thing that separates actions from observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32

if TYPE_CHECKING:
    import torch

    from indexshare.replay import Recorded

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of the stream. `index` is its identity: the same text twice is two groups."""

    index: int
    ids: Int32[np.ndarray, " prompt"]
    text: str
    task: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One sampled response and what is known of it; filled in by `dataclasses.replace` as the step goes on.

    Arrays over the response have its length; `values` has one more entry: the value after the last token. Where an
    environment wrote part of the response, `action_mask` is false there and `rollout_logprobs` 0.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: Int32[np.ndarray, " prompt"]
    response_ids: Int32[np.ndarray, " response"]
    action_mask: Bool[np.ndarray, " response"]
    rollout_logprobs: Float32[np.ndarray, " response"]
    finish_reason: FinishReason
    policy_version: int
    prompt_text: str = ""
    text: str = ""
    task: str = ""
    answer: str = ""
    token_rewards: Float32[np.ndarray, " response"] | None = None
    """What an environment paid, each turn's reward on the turn's last token; the score is their sum."""
    score: float | None = None
    old_logprobs: Float32[np.ndarray, " response"] | None = None
    reference_logprobs: Float32[np.ndarray, " response"] | None = None
    values: Float32[np.ndarray, " response+1"] | None = None
    advantages: Float32[np.ndarray, " response"] | None = None
    value_targets: Float32[np.ndarray, " response"] | None = None
    selected: Recorded | None = None
    """What the engine's Full layers selected, where that was asked for (`indexshare.replay`)."""
    loss_weight: float = 0.0
    """What one action token of this trajectory weighs in the loss of its optimizer step (`rl.losses`)."""

    @property
    def tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def actions(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.action_mask.sum())


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch on a worker.

    `tokens` counts prompts and responses, `responses` the response tokens of all trajectories, laid end to
    end. `seq_start[t]` is the first flat index of token t's own trajectory: nothing may look before it.
    `predicts[i]` is the flat index of the token whose hidden state predicts response token i; the value of
    the state before response token i is read there too. `trajectory[i]` is the number of the trajectory that
    response token i belongs to, and `last[j]` the last token of trajectory j.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    seq_start: torch.Tensor
    predicts: torch.Tensor
    targets: torch.Tensor
    action_mask: torch.Tensor
    loss_weights: torch.Tensor
    trajectory: torch.Tensor
    last: torch.Tensor
    fields: dict[str, torch.Tensor]
    """Per-response-token arrays by name (`old_logprobs`, `advantages`, ...), those that exist."""
    selected: tuple[Recorded, ...] = ()
    """What the engine selected, of every trajectory or none; only a policy that replays unpacks it."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory."""
        return self.last.diff(prepend=self.last.new_tensor([-1])).tolist()


PER_TOKEN = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages", "value_targets")


def pack(trajectories: Sequence[Trajectory], device: str = "cpu") -> Batch:
    """Lay trajectories end to end. `values` enter as [responses], the value before each response token.

    Raises ValueError for what would shift or mix up tokens in silence: an empty prompt (its first response
    token would be predicted by the trajectory before it), an array of another length than the response, a
    field that only some of the trajectories have.
    """
    import torch

    if not trajectories:
        raise ValueError("a pack needs at least one trajectory")
    for t in trajectories:
        _check(t)
    ids, positions, starts, predicts, targets, last = [], [], [], [], [], []
    offset = 0
    for t in trajectories:
        n, p, r = t.tokens, len(t.prompt_ids), len(t.response_ids)
        ids += [t.prompt_ids, t.response_ids]
        positions.append(np.arange(n))
        starts.append(np.full(n, offset))
        predicts.append(offset + p - 1 + np.arange(r))
        targets.append(t.response_ids)
        last.append(offset + n - 1)
        offset += n

    def joined(parts: Iterable[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(dtype)).to(device)

    fields = {}
    for name in (*PER_TOKEN, "values"):
        arrays = [getattr(t, name) for t in trajectories if getattr(t, name) is not None]
        if arrays and len(arrays) < len(trajectories):
            raise ValueError(f"{name}: only {len(arrays)} of {len(trajectories)} trajectories of a pack have it")
        if arrays:
            fields[name] = joined((a[:-1] if name == "values" else a for a in arrays), np.float32)
    return Batch(
        ids=joined(ids, np.int64),
        position_ids=joined(positions, np.int64),
        seq_start=joined(starts, np.int64),
        predicts=joined(predicts, np.int64),
        targets=joined(targets, np.int64),
        action_mask=joined([t.action_mask for t in trajectories], np.bool_),
        loss_weights=joined([np.full(len(t.response_ids), t.loss_weight) for t in trajectories], np.float32),
        trajectory=joined([np.full(len(t.response_ids), i) for i, t in enumerate(trajectories)], np.int64),
        last=joined([np.array(last)], np.int64),
        fields=fields,
        selected=_selected(trajectories),
    )


def _selected(trajectories: Sequence[Trajectory]) -> tuple[Recorded, ...]:
    recorded = tuple(t.selected for t in trajectories if t.selected is not None)
    if recorded and len(recorded) < len(trajectories):
        raise ValueError(f"selected: only {len(recorded)} of {len(trajectories)} trajectories of a pack have it")
    return recorded


def _check(t: Trajectory) -> None:
    where = f"trajectory (prompt {t.prompt_index}, sample {t.sample_index})"
    if not len(t.prompt_ids):
        raise ValueError(f"{where}: empty prompt, nothing predicts the first response token")
    expected = dict.fromkeys(("action_mask", "token_rewards", *PER_TOKEN), len(t.response_ids))
    expected["values"] = len(t.response_ids) + 1
    for name, length in expected.items():
        array = getattr(t, name)
        if array is not None and len(array) != length:
            raise ValueError(f"{where}: {name} has {len(array)} entries, must have {length}")


def microbatches(trajectories: Sequence[Trajectory], tokens_per_microbatch: int) -> list[list[Trajectory]]:
    """Cut trajectories, in their order, into micro-batches of at most `tokens_per_microbatch` tokens.

    A trajectory longer than that is a micro-batch of its own.
    """
    batches: list[list[Trajectory]] = []
    used = 0
    for t in trajectories:
        if not batches or used + t.tokens > tokens_per_microbatch:
            batches.append([])
            used = 0
        batches[-1].append(t)
        used += t.tokens
    return batches


def shard(trajectories: Sequence[Trajectory], ranks: int) -> list[list[Trajectory]]:
    """Spread trajectories over ranks, token counts near equal: longest first, to the lightest rank."""
    shards: list[list[Trajectory]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for t in sorted(trajectories, key=lambda t: -t.tokens):
        rank = load.index(min(load))
        shards[rank].append(t)
        load[rank] += t.tokens
    return shards


def with_arrays(trajectories: Sequence[Trajectory], **arrays: Sequence[np.ndarray]) -> list[Trajectory]:
    """The same trajectories with per-trajectory arrays set, in the same order."""
    out = list(trajectories)
    for name, values in arrays.items():
        changes: list[dict[str, Any]] = [{name: v} for v in values]
        out = [replace(t, **change) for t, change in zip(out, changes, strict=True)]
    return out
