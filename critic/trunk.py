"""The frozen part of a critic: a backbone, or its lower layers, without gradient and paid for once per step."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from critic.trunk_cache import StateCache
from rl.backbone import hidden_states
from rl.config import ConfigError
from rl.logprobs import logprobs_and_entropy
from rl.trajectory import Batch


@dataclass(frozen=True)
class Span:
    """A trajectory of a pack: its tokens [begin, end), of which the last `responses` + 1 have values."""

    begin: int
    end: int
    responses: int


def spans(batch: Batch) -> list[Span]:
    """The trajectories of a pack, in order."""
    ends = [last + 1 for last in batch.last.tolist()]
    responses = torch.bincount(batch.trajectory, minlength=len(ends)).tolist()
    return [Span(b, e, r) for b, e, r in zip([0, *ends[:-1]], ends, responses, strict=True)]


class SharedReference:
    """The KL reference, of which a trunk is the lower `layers`: one forward serves both."""

    def __init__(self, lm: Any, layers: int, temperature: float) -> None:
        self.lm = lm.requires_grad_(False).eval()
        self.layers = layers
        self.temperature = temperature

    def __call__(self, batch: Batch) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, " responses"]]:
        """The trunk's states of every token, and the log-probability of every response token."""
        backbone = getattr(self.lm, self.lm.base_model_prefix)
        with _passed_on(backbone.layers[self.layers - 1]) as passed:
            hidden = hidden_states(backbone, batch)
        head = self.lm.get_output_embeddings().weight
        logprobs, _ = logprobs_and_entropy(hidden[batch.predicts], head, batch.targets, self.temperature)
        return (hidden if self.layers == len(backbone.layers) else passed[0]), logprobs


class FrozenTrunk:
    """Hidden states of a frozen backbone, each trajectory's computed once until `new_step`.

    Deliberately no `nn.Module`: it stands outside the module that DeepSpeed trains, shards and saves. States are
    remembered by what they are a function of, the token ids, so that a hit can never be another trajectory's.
    """

    def __init__(
        self,
        backbone: nn.Module,
        cache: StateCache,
        *,
        every_token: bool = False,
        reference: SharedReference | None = None,
    ) -> None:
        self.backbone = backbone.requires_grad_(False).eval()
        self.cache = cache
        self.every_token = every_token
        """Whether all tokens' states are wanted, or only those at which values are read."""
        self.reference = reference
        self._logprobs: dict[bytes, Tensor] = {}
        self.forwards = 0
        """Trajectories that went through the backbone, ever."""

    def new_step(self) -> None:
        """Forget the last step's states."""
        self.cache.clear()
        self._logprobs.clear()

    def states(self, batch: Batch) -> Float[Tensor, "rows hidden"]:
        """States of a pack's trajectories end to end.

        Of each trajectory all tokens, or those before every response token and after the last: responses + 1 rows.
        """
        every = spans(batch)
        keys = _keys(batch, every)
        found = [self.cache.get(key) for key in keys]
        missing = [j for j, states in enumerate(found) if states is None]
        if missing:
            wanted = [every[j] for j in missing]
            for j, states in zip(missing, self._forward(batch, wanted, [keys[j] for j in missing]), strict=True):
                self.cache.put(keys[j], states)
                found[j] = states
        return torch.cat([s.to(batch.ids.device) for s in found if s is not None])

    def reference_logprobs(self, batch: Batch) -> Float[Tensor, " responses"]:
        """The reference's log-probabilities of a pack's response tokens, from the forward that gave their states."""
        keys = _keys(batch, spans(batch))
        if not all(key in self._logprobs for key in keys):
            self.states(batch)
        return torch.cat([self._logprobs[key] for key in keys])

    @torch.no_grad()
    def _forward(self, batch: Batch, wanted: Sequence[Span], keys: Sequence[bytes]) -> list[Tensor]:
        """The backbone over some trajectories of a pack; one tensor of rows for each."""
        self.forwards += len(wanted)
        part, lengths = _part(batch, wanted), [s.end - s.begin for s in wanted]
        if self.reference is None or all(key in self._logprobs for key in keys):
            hidden = hidden_states(self.backbone, part)
        else:
            hidden, logprobs = self.reference(part)
            self._logprobs.update(zip(keys, logprobs.split([s.responses for s in wanted]), strict=True))
        rows = zip(hidden.split(lengths), wanted, strict=True)
        return [h if self.every_token else h[-1 - s.responses :] for h, s in rows]


def _keys(batch: Batch, every: Sequence[Span]) -> list[bytes]:
    ids = batch.ids.cpu().numpy()
    return [hashlib.blake2b(ids[s.begin : s.end].tobytes() + b"%d" % s.responses).digest() for s in every]


def _part(batch: Batch, wanted: Sequence[Span]) -> Batch:
    """Some trajectories of a pack, as a pack of their own; without what belongs to a loss."""
    device = batch.ids.device
    lengths = torch.tensor([s.end - s.begin for s in wanted], device=device)
    ends = lengths.cumsum(0)
    tokens = torch.cat([torch.arange(s.begin, s.end, device=device) for s in wanted])
    responses = torch.tensor([s.responses for s in wanted], device=device)
    before = [(int(end) - 1, s.responses) for end, s in zip(ends, wanted, strict=True)]
    return replace(
        batch,
        ids=batch.ids[tokens],
        position_ids=batch.position_ids[tokens],
        seq_start=(ends - lengths).repeat_interleave(lengths),
        predicts=torch.cat([torch.arange(last - n, last, device=device) for last, n in before]),
        targets=torch.cat([batch.ids[s.end - s.responses : s.end] for s in wanted]),
        trajectory=torch.arange(len(wanted), device=device).repeat_interleave(responses),
        last=ends - 1,
    )


@contextmanager
def _passed_on(layer: nn.Module) -> Iterator[list[Tensor]]:
    """The states that a layer hands to the next, one [tokens, hidden] for each forward inside."""
    passed: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        states = out if isinstance(out, Tensor) else out[0]  # some layers return more than states
        passed.append(states.flatten(0, -2))

    hook = layer.register_forward_hook(keep)
    try:
        yield passed
    finally:
        hook.remove()


class _Given(nn.Module):
    """Stands for the embeddings of a backbone's upper layers: answers with the states of the layers below."""

    states: Tensor

    def forward(self, _: Tensor) -> Tensor:
        return self.states[None]


def below(backbone: Any, layer: int, key: str) -> nn.Module:
    """A backbone's layers below `layer`, without the last norm. They share its weights.

    Raises ConfigError, naming the `key` that asks for it, for a backbone that is more than embeddings, layers and a
    norm.
    """
    if not all(hasattr(backbone, name) for name in ("embed_tokens", "layers", "norm")):
        raise _uncuttable(backbone, key)
    lower = _with_layers(backbone, slice(0, layer))
    lower.norm = nn.Identity()
    probe = _probe(backbone)
    with torch.no_grad(), _passed_on(backbone.layers[layer - 1]) as passed:
        states, _ = hidden_states(lower, probe), hidden_states(backbone, probe)
    _agree(states, passed[-1], backbone, key)
    return lower


def cut(backbone: Any, layer: int, key: str) -> tuple[nn.Module, nn.Module]:
    """What is `below` the layer, and the rest with the last norm. They share the backbone's weights."""
    lower, upper = below(backbone, layer, key), _with_layers(backbone, slice(layer, None))
    upper.embed_tokens = _Given()
    probe = _probe(backbone)
    with torch.no_grad():
        _agree(hidden_states(backbone, probe), upper_states(upper, hidden_states(lower, probe), probe), backbone, key)
    return lower, upper


def upper_states(upper: Any, states: Float[Tensor, "tokens hidden"], batch: Batch) -> Float[Tensor, "tokens hidden"]:
    """The last hidden states from those of the layers below a cut."""
    upper.embed_tokens.states = states.to(next(upper.parameters()).dtype)
    try:
        return hidden_states(upper, batch)
    finally:
        del upper.embed_tokens.states


def cut_before(config: Any, layer: int) -> int:
    """The last layer at or below `layer` at which a backbone can be cut.

    A Shared layer of IndexShare reuses what the Full layer before it selected, so a cut comes before a Full one.
    """
    types = getattr(config, "indexer_types", None) if config.model_type == "glm_moe_dsa" else None
    while types and types[layer] != "full":
        layer -= 1
    return layer


def _with_layers(backbone: Any, layers: slice) -> Any:
    part = copy.copy(backbone)
    part._modules = dict(backbone._modules)
    part.config = copy.deepcopy(backbone.config)
    part.layers = backbone.layers[layers]
    # Some models look up a layer's kind by its place.
    if getattr(part.config, "layer_types", None):
        part.config.layer_types = part.config.layer_types[layers]
    return part


def _probe(backbone: Any) -> Batch:
    """A few tokens, to see whether parts say what the whole says."""
    ids = torch.arange(8, device=backbone.embed_tokens.weight.device)
    return Batch(ids, ids, torch.zeros_like(ids), ids, ids, ids > 0, ids, ids, ids[-1:], {})


def _agree(a: Tensor, b: Tensor, backbone: nn.Module, key: str) -> None:
    if not torch.allclose(a, b, rtol=1e-2, atol=1e-3):
        raise _uncuttable(backbone, key)


def _uncuttable(backbone: nn.Module, key: str) -> ConfigError:
    uncut = "0" if key == "critic.first_trainable_layer" else "the number of its layers"
    return ConfigError(f"{key}: a {type(backbone).__name__} cannot be cut between layers, must be {uncut}")
