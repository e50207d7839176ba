"""IndexShare: what must hold for every schedule, every selection and every way to cut the work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import GlmMoeDsaConfig

from indexshare import attention, indexer, selection
from indexshare.indexer import Chunk, chunk_scores, scan, segment_bounds
from indexshare.schedule import Schedule, check_checkpoint, check_config
from indexshare.selection import index_scores, stable_topk, stable_topk_by_position, stable_topk_mask

ILLEGAL = float("-inf")


# ------------------------------------------------------------------------------------------------ selection
def by_position(scores: Tensor, k: int) -> list[list[int]]:
    """The definition, slowly: best first, ties to the lowest position, then put in order of position."""
    rows = []
    for row in scores.tolist():
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        rows.append(sorted(i for i in best if row[i] != ILLEGAL))
    return rows


@st.composite
def score_matrices(draw: st.DrawFn) -> Tensor:
    """Few distinct values, so that ties are everywhere, and a share of illegal keys; wide enough to be thinned out."""
    rows, keys, values = draw(st.integers(1, 4)), draw(st.integers(1, 160)), draw(st.sampled_from([2, 5, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scores = torch.randint(-values // 2, values, (rows, keys), generator=generator).relu().float()
    return scores.masked_fill(torch.rand(rows, keys, generator=generator) < draw(st.floats(0, 1)), ILLEGAL)


@given(score_matrices(), st.integers(1, 30), st.integers(0, 50))
def test_selection_is_a_function_of_its_scores(scores: Tensor, k: int, more: int) -> None:
    expected = by_position(scores, k)
    keys = scores.shape[1]
    # Whatever stands beside a row, and however many illegal keys follow, a row's selection is its own.
    wider = torch.cat([scores, torch.full((len(scores), more), ILLEGAL)], 1)
    for some in (scores, wider):
        chosen = stable_topk_by_position(some, k)
        assert [[i for i in row if i >= 0] for row in chosen.tolist()] == expected
        assert all(sorted(row, key=lambda i: i < 0) == row for row in chosen.tolist()), "NONE comes last"
        assert [row.nonzero()[:, 0].tolist() for row in stable_topk_mask(some, k)] == expected
    for row, one in zip(scores, expected, strict=True):
        assert [i for i in stable_topk_by_position(row, k).tolist() if i >= 0] == one
    assert [sorted(i for i in row if i >= 0) for row in stable_topk(scores, k).tolist()] == expected
    assert stable_topk_by_position(scores, k).shape == (len(scores), min(k, keys))


def test_wide_rows_are_thinned_out_before_they_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0))
    found = selection._candidates(scores, 20)
    assert found is not None
    assert found[2].max() < 300
    short = torch.cat([scores, torch.full((1, 2000), ILLEGAL)])
    short[-1, [3, 1000]] = 0.0
    thinned = selection._candidates(short, 20)
    assert thinned is not None, "one short row among long ones, as when requests decode together"
    assert thinned[2].tolist() == [*found[2].tolist(), 2]
    # Nothing to gain: too few columns, or as good as all keys tie.
    assert selection._candidates(scores[:, :70], 20) is None
    assert selection._candidates(torch.zeros(2, 2000), 20) is None
    widths = []
    monkeypatch.setattr(
        selection, "_mask", lambda s, k, stock=selection._mask: widths.append(s.shape[1]) or stock(s, k)
    )
    assert stable_topk_by_position(scores, 20).tolist() == by_position(scores, 20)
    assert widths == [int(found[2].max())]


@pytest.mark.parametrize("elements", [1, 500, 1 << 20])
def test_scan_equals_the_differentiable_scores(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(selection, "SCORE_ELEMENTS", elements)  # tiles of 1, a few and all keys
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((30, 3, 8), (30, 8), (30, 3)))
    for chunk in (Chunk(0, 0, 7), Chunk(5, 12, 30), Chunk(29, 29, 30)):
        torch.testing.assert_close(scan(q, k, w, 0.3, chunk), chunk_scores(q, k, w, 0.3, chunk), rtol=1e-12, atol=0)
    slow = torch.einsum("qhd,kd->qhk", q[21:], k).relu().mul(w[21:, :, None]).sum(1)
    later = torch.arange(30) > torch.arange(21, 30)[:, None]
    torch.testing.assert_close(
        index_scores(q[21:], k, w[21:]), slow.masked_fill(later, ILLEGAL), rtol=1e-12, atol=1e-12
    )


def select(lengths: list[int], k: int, gather: bool, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Positions that the trainer's selection takes for every query, from whole-numbered scores full of ties."""
    tokens = sum(lengths)
    starts = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    # A token's projections depend on its number within the trajectory and on the trajectory's length alone.
    own = [torch.randint(-2, 3, (n, 12), generator=torch.Generator().manual_seed(n)) for n in lengths]
    q, key, w = torch.cat(own).double().split([6, 3, 3], 1)
    w = w[:, :2]
    monkeypatch.setattr(indexer, "project", lambda *_: (q.view(tokens, 2, 3), key, w))
    stub = SimpleNamespace(index_topk=k, softmax_scale=1.0)
    hidden = torch.zeros(1, tokens, 1, dtype=torch.float64)
    chosen = indexer.select(stub, hidden, hidden, (hidden, hidden), segment_bounds(starts, tokens), gather)  # type: ignore[arg-type]
    if chosen.indices is not None:
        return [[i for i in row if i >= 0] for row in chosen.indices.tolist()]
    assert chosen.biases is not None
    return [
        [chunk.start + i for i in row.isfinite().nonzero()[:, 0].tolist()]
        for chunk, bias in zip(chosen.chunks, chosen.biases, strict=True)
        for row in bias
    ]


@pytest.mark.parametrize("k", [1, 5, 1000])
def test_the_trainer_selects_alike_for_every_form_chunk_and_packing(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    lengths = [33, 1, 90, 4]
    together = select(lengths, k, True, monkeypatch)
    at = 0
    for n in lengths:
        alone = select([n], k, True, monkeypatch)
        assert [[at + i for i in row] for row in alone] == together[at : at + n]
        for query, row in enumerate(together[at : at + n]):
            assert len(row) == min(k, query + 1)
            assert all(at <= i <= at + query for i in row), "a future or a foreign position"
        at += n
    for size in (3, 64):
        monkeypatch.setattr(indexer, "QUERY_CHUNK", size)
        for gather in (True, False):
            assert select(lengths, k, gather, monkeypatch) == together


# ------------------------------------------------------------------------------------------------ gathering
def gathered(seed: int = 0) -> tuple[Tensor, ...]:
    """q [tokens, heads, nope + rope], latents, up and indices of three trajectories of 20, 3 and 30 tokens; k is 6."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((53, 2, 7), (53, 8), (2, 9, 5))
    q, latents, up = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
    rows = []
    for start, n in ((0, 20), (20, 3), (23, 30)):
        for i in range(n):
            best = torch.randperm(i + 1, generator=generator)[:6].sort().values + start
            rows.append(torch.cat([best, torch.full((6 - len(best),), -1)]))
    return q, latents, up, torch.stack(rows).int()


def naive(q: Tensor, latents: Tensor, up: Tensor, indices: Tensor, nope: int, scale: float) -> Tensor:
    """Query by query, keys and values expanded."""
    rank = up.shape[-1]
    rows = []
    for query, chosen in zip(q, indices.tolist(), strict=True):
        kv = latents[[i for i in chosen if i >= 0]]
        expanded = torch.einsum("kr,hdr->hkd", kv[:, :rank], up)
        keys = torch.cat([expanded[..., :nope], kv[:, rank:].expand(len(query), -1, -1)], -1)
        p = (torch.einsum("hd,hkd->hk", query, keys) * scale).softmax(-1)
        rows.append(torch.einsum("hk,hkv->hv", p, expanded[..., nope:]))
    return torch.stack(rows)


@pytest.mark.parametrize(("block", "elements"), [(512, 1 << 19), (7, 1), (16, 200)])
def test_gathering_equals_the_naive_sum_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, block: int, elements: int
) -> None:
    monkeypatch.setattr(attention, "ABSORB_BLOCK", block)
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", elements)
    q, latents, up, indices = gathered()
    weights = torch.randn(53, 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want, got = naive(q, latents, up, indices, 4, 0.4), attention.GatherAttention.apply(q, latents, up, indices, 4, 0.4)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    wanted, gotten = (torch.autograd.grad((out * weights).sum(), (q, latents, up)) for out in (want, got))
    for a, b in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_place_without_a_key_touches_nothing() -> None:
    """Not even where the first latents, which belong to another trajectory, are not finite."""
    q, latents, up, indices = gathered()
    with torch.no_grad():
        latents[:20] = float("nan")
    out = attention.GatherAttention.apply(q, latents, up, indices, 4, 0.4)[20:]
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.sum(), (latents,))[0]
    assert gradients[20:].isfinite().all()


# ------------------------------------------------------------------------------------------------ schedule
@given(st.text("FS", min_size=0, max_size=40))
def test_every_schedule_survives_its_config(rest: str) -> None:
    schedule = Schedule.from_pattern("F" + rest)
    assert Schedule.from_config({"num_hidden_layers": len(rest) + 1, **schedule.config_fields()}) == schedule
    served = schedule.served_layers()
    assert [i for layers in served.values() for i in layers] == list(range(len(rest) + 1))
    assert all(
        layers[0] == full and "F" not in schedule.pattern[full + 1 : layers[-1] + 1] for full, layers in served.items()
    )


@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 9))
def test_a_frequency_is_what_transformers_makes_of_it(layers: int, freq: int, offset: int) -> None:
    schedule = Schedule.from_freq(layers, freq, offset)
    config = GlmMoeDsaConfig(num_hidden_layers=layers, index_topk_freq=freq, index_skip_topk_offset=offset)
    assert list(schedule.types) == config.indexer_types


def test_a_pipeline_stage_starts_on_a_full_layer() -> None:
    glm = Schedule.from_freq(78, freq=4, offset=3)
    glm.check_stages([0, 26, 54])
    with pytest.raises(ValueError, match=r"^pipeline stage: starts at layer 39, which is Shared; must start at one of"):
        glm.check_stages([0, 39])
    with pytest.raises(ValueError, match="starts at layer 78, must be below 78"):
        glm.check_stages([78])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk": 0}, "index_topk: 0 given, must be at least 1"),
        ({"index_topk": -3}, "index_topk: -3 given, must be at least 1"),
        ({"model_type": "llama"}, "index_topk: absent from the llama config: the model has no indexers"),
    ],
)
def test_configs_without_a_selection_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config({"num_hidden_layers": 2, "index_topk_freq": 1, **fields})


def checkpoint(folder: Path, config: str, weights: str) -> Path:
    fields = {"num_hidden_layers": len(config), "index_topk": 4, **Schedule.from_pattern(config).config_fields()}
    (folder / "config.json").write_text(json.dumps(fields))
    names = [f"model.layers.{i}.self_attn.indexer.wk.weight" for i, letter in enumerate(weights) if letter == "F"]
    tensors = {name: torch.zeros(1) for name in [*names, "model.layers.1.self_attn.q_a_proj.weight"]}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_checkpoint_of_another_schedule_is_refused_with_both(tmp_path: Path) -> None:
    # The last layer of the weights is GLM's multi-token prediction, which is beyond the schedule.
    assert check_checkpoint(checkpoint(tmp_path, "FFSSF", "FFSSFF")).pattern == "FFSSF"
    with pytest.raises(ValueError, match="its config says FFSSF, its weights are of FSSSF") as error:
        check_checkpoint(checkpoint(tmp_path, "FFSSF", "FSSSF"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no layer has an indexer"):
        check_checkpoint(checkpoint(tmp_path, "FFSSF", "SSSSS"))


def test_a_checkpoint_in_shards_is_read_from_its_index(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "FSF", "FFF")
    weight_map = {f"model.layers.{i}.self_attn.indexer.wk.weight": "a.safetensors" for i in (0, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert check_checkpoint(folder).pattern == "FSF"
