"""Gives a model another pattern of Full and Shared layers, for a trial or for good, and compares what layers select."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM, GlmMoeDsaIndexer

from indexshare.distill import LayerInput, projected
from indexshare.indexer import chunk_scores, chunked, segment_bounds
from indexshare.schedule import Schedule
from indexshare.selection import stable_topk_mask

EVERYTHING = 1 << 30
"""As `index_topk` a number above any length: dense attention."""


def indexers(model: GlmMoeDsaForCausalLM) -> dict[int, GlmMoeDsaIndexer]:
    """The indexers of a model by layer."""
    attentions = enumerate(layer.self_attn for layer in model.model.layers)
    return {i: attention.indexer for i, attention in attentions if attention.indexer is not None}


def set_topk(model: GlmMoeDsaForCausalLM, k: int) -> None:
    """Keys that every indexer selects from now on."""
    for indexer in indexers(model).values():
        indexer.index_topk = k


@contextmanager
def selecting(model: GlmMoeDsaForCausalLM, k: int) -> Iterator[None]:
    """Inside, every indexer selects k keys; `EVERYTHING` is dense attention."""
    before = {indexer: indexer.index_topk for indexer in indexers(model).values()}
    set_topk(model, k)
    try:
        yield
    finally:
        for indexer, topk in before.items():
            indexer.index_topk = topk


def adopt(model: GlmMoeDsaForCausalLM, schedule: Schedule) -> None:
    """Makes the pattern the model's own: indexers of its Shared layers are dropped, the config says so.

    Raises ValueError where a Full layer has no indexer, or the number of layers differs.
    """
    _check_layers(model, schedule)
    there = indexers(model)
    missing = [i for i in schedule.full_layers if i not in there]
    if missing:
        raise ValueError(
            f"pattern: {schedule.pattern} given, but layer {missing[0]} has no indexer, "
            f"the model is {Schedule.from_config(model.config).pattern}"
        )
    _set(model, schedule, {i: there[i] for i in schedule.full_layers})


def adopt_anew(model: GlmMoeDsaForCausalLM, schedule: Schedule) -> None:
    """Makes the pattern the model's own, with new random indexers, drawn as transformers draws them.

    Raises ValueError where the number of layers differs.
    """
    _check_layers(model, schedule)
    like = next(model.parameters())
    fresh = {i: GlmMoeDsaIndexer(model.config, i).to(like.device, like.dtype) for i in schedule.full_layers}
    for indexer in fresh.values():
        for module in indexer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, model.config.initializer_range)
    _set(model, schedule, fresh)


def _set(model: GlmMoeDsaForCausalLM, schedule: Schedule, chosen: Mapping[int, GlmMoeDsaIndexer]) -> None:
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.indexer = chosen.get(i)
        layer.self_attn.skip_topk = i not in chosen  # what the stock class looks at
    schedule.write(model.config)


def _check_layers(model: GlmMoeDsaForCausalLM, schedule: Schedule) -> None:
    if len(schedule.types) != len(model.model.layers):
        raise ValueError(f"pattern: {schedule.pattern} given, must have the model's {len(model.model.layers)} layers")


@contextmanager
def trying(model: GlmMoeDsaForCausalLM, schedule: Schedule) -> Iterator[None]:
    """Inside, the model has that pattern; afterwards its own again. Raises as `adopt`."""
    kept, own = indexers(model), Schedule.from_config(model.config)
    adopt(model, schedule)
    try:
        yield
    finally:
        _set(model, own, kept)


@torch.no_grad()
def overlap(
    model: GlmMoeDsaForCausalLM, inputs: list[LayerInput], seq_start: Tensor, k: int, chunk_size: int = 128
) -> Tensor:
    """[full, full]: of the k keys that one Full layer's indexer selects, the share that another's selects too.

    A mean over the queries with more than k legal keys; NaN where there is none. `inputs` come from
    `distill.record`.
    """
    there = indexers(model)
    bounds = segment_bounds(seq_start, inputs[0].hidden.shape[1])
    scored = {i: projected(model.model.layers[i].self_attn, inputs[i]) for i in there}
    common = torch.zeros(len(there), len(there), dtype=torch.float64)
    queries = 0
    for chunk in chunked(bounds, chunk_size):
        first = max(0, chunk.start + k - chunk.begin)
        if chunk.begin + first >= chunk.end:
            continue
        scores = (chunk_scores(*scored[i], indexer.softmax_scale, chunk) for i, indexer in there.items())
        chosen = torch.stack([stable_topk_mask(s, k)[first:].flatten() for s in scores]).float()
        common += (chosen @ chosen.t()).double().cpu()
        queries += chunk.end - chunk.begin - first
    return common / (queries * k) if queries else common.fill_(float("nan"))
