"""The value model: a trunk without gradient, experts of the critic's own, a float32 value head.

`critic.freeze` says where the trunk ends. `encoder`: it is the backbone's lower `critic.trunk_layers`. `attention`: it
is the layers below `critic.first_trainable_layer`; above, only MLPs and experts train, and the gradient passes through
the frozen rest. `none`: there is no trunk, everything trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from critic.experts import CriticExperts, ExpertBlock, Experts, Routing, running_mean, stacked
from critic.trunk import FrozenTrunk, SharedReference, below, cut, cut_before, upper_states
from critic.trunk_cache import StateCache
from critic.upcycle import UpcycledMLP, upcycle
from rl import expert_parallel
from rl.backbone import hidden_states, load_causal_lm
from rl.config import ConfigError, CriticConfig, ExpertsConfig
from rl.trajectory import Batch

SEGMENT = 1024
"""States that go through experts and head at once where activations are not kept."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ValueHead(nn.Linear):
    """A linear map to one number, on a scale of its own: centre + spread * (w x + b), in float32."""

    centre: Tensor
    spread: Tensor
    observed: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1)
        # Zero: the first advantages are then the returns themselves, not noise.
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("observed", torch.zeros(()))

    def forward(self, states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
        """A value for each state."""
        x = nn.functional.linear(states.float(), self.weight.float(), self.bias.float()).squeeze(-1)
        return self.centre + self.spread * x


class ValueModel(nn.Module):
    """V(state before each response token) and V(state after the last), of a packed micro-batch.

    `trunk` stays outside the module tree: what is here is what DeepSpeed trains, shards and saves. `backbone` is the
    part of the backbone above the trunk, None where there is nothing left.
    """

    def __init__(
        self,
        hidden: int,
        *,
        trunk: FrozenTrunk | None = None,
        backbone: nn.Module | None = None,
        experts: CriticExperts | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.backbone = backbone
        self.experts = experts
        self.recompute = recompute
        """Gradient checkpointing of experts and head, segment by segment."""
        self.head = ValueHead(hidden)

    def spread(self, size: int) -> None:
        """Spread the experts over groups of `size` ranks (a collective of all ranks)."""
        group = expert_parallel.create_group(size)
        for module in self.modules():
            if isinstance(module, Experts):
                module.spread(group)

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts of the critic's own."""
        return any(isinstance(m, Experts) for m in self.modules())

    def forward(
        self, batch: Batch
    ) -> tuple[Float[Tensor, " responses"], Float[Tensor, " trajectories"], Routing | None]:
        """Values before every response token, and after each trajectory's last token; float32, never scaled.

        Then how the response tokens were routed, None without experts.
        """
        rows, routings = self._states(batch)
        ends = _ends(batch)
        values, above = self._judge(rows, ends)
        before = _before(batch)
        if above is not None:
            routings.append(Routing(above.probabilities[:, before], above.chosen[:, before]))
        return values[before], values[ends - 1], stacked(routings) if routings else None

    def _states(self, batch: Batch) -> tuple[Float[Tensor, "rows hidden"], list[Routing]]:
        """The backbone's states where values are read: before all response tokens and after the last, trajectories end
        to end."""
        if self.backbone is None:
            assert self.trunk is not None
            return self.trunk.states(batch), []
        upcycled = [m for m in self.backbone.modules() if isinstance(m, UpcycledMLP)]
        for mlp in upcycled:
            mlp.routings = []
        try:
            if self.trunk is None:
                hidden = hidden_states(self.backbone, batch)
            else:
                hidden = upper_states(self.backbone, self.trunk.states(batch), batch)
            found = [r for mlp in upcycled for r in mlp.routings or ()]
        finally:
            for mlp in upcycled:
                mlp.routings = None
        ends, at = _ends(batch), batch.predicts
        read = at.new_empty(len(at) + len(ends))
        read[_before(batch)], read[ends - 1] = at, batch.last
        return hidden[read], [Routing(r.probabilities[:, at], r.chosen[:, at]) for r in found]

    def _judge(
        self, rows: Float[Tensor, "rows hidden"], ends: Int[Tensor, " trajectories"]
    ) -> tuple[Float[Tensor, " rows"], Routing | None]:
        """Experts and head. Where activations are not kept, or recomputed, the rows go through in segments."""
        if self.experts is None:
            return self.head(rows), None
        past = running_mean(rows.float(), ends)
        recompute = self.recompute and torch.is_grad_enabled()
        if torch.is_grad_enabled() and not recompute:
            return self._segment(rows, past)
        # Ranks that ask each other's experts must ask equally often, whatever their rows.
        apart = any(expert_parallel.is_spread(p) for p in self.experts.parameters())
        size = len(rows) if apart else SEGMENT
        parts = [
            checkpoint(self._segment, *part, use_reentrant=False) if recompute else self._segment(*part)
            for part in zip(rows.split(size), past.split(size), strict=True)
        ]
        routing = Routing(torch.cat([r.probabilities for _, r in parts], 1), torch.cat([r.chosen for _, r in parts], 1))
        return torch.cat([values for values, _ in parts]), routing

    def _segment(self, rows: Tensor, past: Tensor) -> tuple[Tensor, Routing]:
        assert self.experts is not None
        x, routing = self.experts(rows.float(), past)
        return self.head(x), routing


def _ends(batch: Batch) -> Int[Tensor, " trajectories"]:
    """Where each trajectory's rows end: one row before every response token, and one after the last."""
    return torch.bincount(batch.trajectory, minlength=len(batch.last)).add(1).cumsum(0)


def _before(batch: Batch) -> Int[Tensor, " responses"]:
    """The rows before response tokens."""
    return torch.arange(len(batch.predicts), device=batch.trajectory.device) + batch.trajectory


def build(
    config: CriticConfig, policy_path: str, device: str = "cpu", *, reference_temperature: float | None = None
) -> ValueModel:
    """The critic as configured, its trunk and all on the device.

    With a `reference_temperature` the frozen encoder's model is the KL reference as well (see `SharedReference`).
    """
    frozen = config.freeze != "none"
    trained, trunk_dtype = DTYPES[config.deepspeed.dtype], DTYPES[config.trunk_dtype]
    recompute = config.deepspeed.gradient_checkpointing
    lm = load_causal_lm(
        config.path or policy_path,
        trunk_dtype if config.freeze == "encoder" else trained,
        gradient_checkpointing=recompute and not frozen,
    )
    hidden = lm.config.hidden_size
    whole = getattr(lm, lm.base_model_prefix).to(device)
    trunk: FrozenTrunk | None = None
    backbone: Any = whole
    if config.freeze == "encoder":
        lower: Any = _lower(config, whole)
        backbone = None
        shared = None
        if reference_temperature is not None:
            shared = SharedReference(lm.to(device), len(lower.layers), reference_temperature)
        trunk = FrozenTrunk(lower, _cache(config), reference=shared)
    elif config.freeze == "attention":
        trunk, backbone = _attention_frozen(config, whole, trunk_dtype, trained)
        if recompute:
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    experts = _experts(config.experts, expert_blocks(config), hidden, trained)
    return ValueModel(hidden, trunk=trunk, backbone=backbone, experts=experts, recompute=recompute).to(device)


def expert_blocks(config: CriticConfig) -> int:
    """Blocks of experts on top of the trunk."""
    if config.experts.blocks is not None:
        return config.experts.blocks
    return 2 if config.freeze == "encoder" else 0


def parameter_counts(model: ValueModel) -> dict[str, int]:
    """What trains and what does not, by part: `trained/experts`, `frozen/trunk` and so on; nothing else is there."""
    counts: dict[str, int] = {}
    for part, parameters in _parts(model):
        for p in parameters:
            # ZeRO 3 empties a parameter's tensor and keeps its size beside it.
            size = int(getattr(p, "ds_numel", p.numel())) * expert_parallel.ranks_of(p)
            key = f"{'trained' if p.requires_grad else 'frozen'}/{part}"
            counts[key] = counts.get(key, 0) + size
    return counts


def _parts(model: ValueModel) -> Iterator[tuple[str, Iterator[nn.Parameter]]]:
    if model.trunk is not None:
        trunk = list(model.trunk.backbone.parameters())
        yield "trunk", iter(trunk)
        if model.trunk.reference is not None:
            held = {id(p) for p in trunk}
            yield "reference", (p for p in model.trunk.reference.lm.parameters() if id(p) not in held)
    for name, child in model.named_children():
        yield name, child.parameters()


def _experts(config: ExpertsConfig, blocks: int, hidden: int, dtype: torch.dtype) -> CriticExperts | None:
    if not blocks:
        return None
    intermediate = config.intermediate_size or 2 * hidden
    return CriticExperts(
        hidden,
        [ExpertBlock(hidden, Experts(hidden, intermediate, config.count, config.top_k, dtype)) for _ in range(blocks)],
    )


def _lower(config: CriticConfig, whole: Any) -> nn.Module:
    """The layers whose states the experts read: the lowest third, or as many as configured."""
    layers = len(whole.layers)
    kept = -(-layers // 3) if config.trunk_layers is None else config.trunk_layers
    if kept > layers:
        raise ConfigError(f"critic.trunk_layers: {kept} given, must be at most {layers}, the layers of the backbone")
    return whole if kept == layers else below(whole, kept, "critic.trunk_layers")


def _attention_frozen(
    config: CriticConfig, whole: Any, trunk_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[FrozenTrunk | None, nn.Module]:
    """The trunk below the first trainable layer, and the layers above, of which MLPs and experts train."""
    first, layers = config.first_trainable_layer, len(whole.layers)
    if first >= layers:
        raise ConfigError(
            f"critic.first_trainable_layer: {first} given, must be below {layers}, the layers of the backbone"
        )
    train = [
        p
        for layer in whole.layers[first:]
        for name, p in layer.mlp.named_parameters()
        if p.requires_grad and name != "gate.weight"
    ]
    whole.requires_grad_(False)
    for p in train:
        p.requires_grad_(True)
    if config.experts.upcycle:
        upcycle(whole.layers[first:], config.experts, dtype)
    below = cut_before(whole.config, first)
    if not below:
        return None, whole
    lower, upper = cut(whole, below, "critic.first_trainable_layer")
    _cast(lower, trunk_dtype)
    return FrozenTrunk(lower, _cache(config), every_token=True), upper


def _cast(backbone: Any, dtype: torch.dtype) -> None:
    """Parameters to a dtype, but for those that the model's class keeps in float32 and for buffers (rotary's are
    shared with the layers above)."""
    kept = {*(backbone._keep_in_fp32_modules or ()), *(backbone._keep_in_fp32_modules_strict or ())}
    for name, p in backbone.named_parameters():
        if not any(word in name for word in kept):
            p.data = p.data.to(dtype)


def _cache(config: CriticConfig) -> StateCache:
    return StateCache(int(config.cache_gib * 2**30), config.cache_dir)
