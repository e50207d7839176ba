"""Index replay: what the engine selected, compactly recorded, and attended to by the trainer instead of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import INDEX_TOPK
from hypothesis import given
from hypothesis import strategies as st
from test_rollout import prompts

from indexshare.indexer import chunked, positions
from indexshare.indexer import given as selection_given
from indexshare.replay import Recorded, complete, overlap, packed, selections
from indexshare.selection import NONE
from policy.model import PolicyModel, build, recorded
from rl.config import Config, ConfigError, PolicyConfig
from rl.config_rules import check
from rl.learner import per_response
from rl.trajectory import Trajectory, pack
from rollout.pool import RolloutPool


@st.composite
def selected(draw: st.DrawFn, queries: int, k: int) -> np.ndarray:
    """A causal selection of at most k keys by every query, ascending."""
    rows = np.full((queries, k), NONE, np.int64)
    for t in range(queries):
        chosen = sorted(draw(st.sets(st.integers(0, t), min_size=1, max_size=k)))
        rows[t, : len(chosen)] = chosen
    return rows


@st.composite
def trajectories(draw: st.DrawFn) -> list[tuple[dict[int, np.ndarray], int]]:
    """Selections of layers 0 and 3, and the number of tokens, of which the last ones may be no queries."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        queries, k = draw(st.integers(1, 12)), draw(st.integers(1, 5))
        layers = {layer: draw(selected(queries, k)) for layer in (0, 3)}
        found.append((layers, queries + draw(st.integers(0, 2))))
    return found


@given(trajectories())
def test_what_was_recorded_comes_back(some: list[tuple[dict[int, np.ndarray], int]]) -> None:
    kept = [Recorded.of(layers) for layers, _ in some]
    for r, (layers, _) in zip(kept, some, strict=True):
        for layer, rows in r.positions().items():
            np.testing.assert_array_equal(rows, layers[layer])
    pack_of = packed(kept, [n for _, n in some])
    offset = 0
    for layers, n in some:
        for layer, rows in layers.items():
            flat = pack_of[layer][offset : offset + n].numpy()
            for t in range(n):
                expected = {p + offset for p in rows[t] if p != NONE} if t < len(rows) else {t + offset}
                assert {p for p in flat[t] if p != NONE} == expected
        offset += n


@given(trajectories(), st.booleans())
def test_a_given_selection_is_the_same_in_both_forms(
    some: list[tuple[dict[int, np.ndarray], int]], gather: bool
) -> None:
    lengths = [n for _, n in some]
    flat = packed([Recorded.of(layers) for layers, _ in some], lengths)[3]
    bounds = (0, *np.cumsum(lengths).tolist())
    selection = selection_given(flat, bounds, gather, torch.float32)
    assert selection.chunks == chunked(bounds, 128)
    torch.testing.assert_close(positions(selection, flat.shape[1]), flat)


def test_long_contexts_cost_less_than_their_positions() -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([np.sort(rng.choice(30_000, 256, replace=False)) for _ in range(50)])
    assert len(Recorded.of({0: rows}).data) < 2 * rows.size


def test_a_query_that_the_engine_did_not_compute_is_an_error() -> None:
    rows = np.array([[NONE, NONE], [0, 1]])
    with pytest.raises(ValueError, match="layer 2: the engine did not say what 1 queries selected"):
        complete(packed([Recorded.of({2: rows})], [2]))


def test_overlap_is_the_share_of_positions_in_common() -> None:
    theirs = torch.tensor([[0, NONE], [0, 1], [0, 2], [1, 3]])
    own = torch.tensor([[0, NONE], [0, 1], [1, 2], [1, 3]])
    assert overlap(own, theirs) == pytest.approx(3 / 4)  # the first two queries select all there is
    assert np.isnan(overlap(own[:2], theirs[:2]))


# ------------------------------------------------------------------------------------------------ with the engine


@pytest.fixture(scope="module")
def rollouts(engine: RolloutPool) -> list[Trajectory]:
    """Responses to prompts below and far above k, all but the last recorded."""
    return engine.generate(prompts([9, 60, 150, 200, 300, 350, 440, 100], seed=31), 1, step=0, record=7)


def test_what_the_prefix_cache_answers_is_not_known(engine: RolloutPool) -> None:
    """And is left out of the overlap; a run that replays has no prefix cache."""
    first, second = engine.generate(prompts([400], seed=33), 2, step=0, record=2)
    complete(recorded(pack([first])))
    with pytest.raises(ValueError, match="did not say what"):
        complete(recorded(pack([second])))


def logprobs(model: PolicyModel, some: list[Trajectory]) -> list[np.ndarray]:
    batch = pack(some)
    with torch.no_grad():
        return per_response(batch, model(batch)[0])


def gap(model: PolicyModel, some: list[Trajectory]) -> np.ndarray:
    found = zip(logprobs(model, some), some, strict=True)
    return np.abs(np.concatenate([a - t.rollout_logprobs for a, t in found]))


def test_replayed_the_trainer_attends_to_what_the_engine_selected(
    engine: RolloutPool, rollouts: list[Trajectory]
) -> None:
    assert [t.selected is None for t in rollouts] == 7 * [False] + [True]
    some = rollouts[:7]
    model = build(PolicyConfig(path=engine.config.policy.path), 1.0).eval()
    for t in some:
        assert t.selected is not None
        assert t.selected.layers == (0, 1, 5)
        assert t.selected.shape[1:] == (t.tokens - 1, min(INDEX_TOPK, t.tokens - 1))
    # An indexer that chooses otherwise, as one does that breaks ties otherwise, only more so.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "indexer.wq_b" in name:
                weight.copy_(weight.flip(0))
    assert np.median(gap(model, some)) > 1e-3
    model.replay = True
    assert gap(model, some).max() < 1e-4
    model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    batch = pack(some[:2])
    model(batch)[0].sum().backward()
    with pytest.raises(ValueError, match=r"indexshare\.replay: true given, but the engine's kernels do not say"):
        model(pack(rollouts[7:]))


def test_gradients_of_a_replay_are_those_of_the_same_selection(engine: RolloutPool, rollouts: list[Trajectory]) -> None:
    batch = pack(rollouts[2:4])
    found = []
    for replay in (False, True):
        model = build(PolicyConfig(path=engine.config.policy.path), 1.0)
        model.replay = replay
        model(batch)[0].sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-4)


def test_engine_and_trainer_overlap_almost_wholly(engine: RolloutPool, rollouts: list[Trajectory]) -> None:
    model = build(PolicyConfig(path=engine.config.policy.path), 1.0).eval()
    for t in rollouts[2:7]:
        batch = pack([t])
        with torch.no_grad(), selections(model.base) as own:
            model(batch)
        theirs = recorded(batch)
        assert own.keys() == theirs.keys()
        for layer, selected in theirs.items():
            assert overlap(positions(own[layer], INDEX_TOPK), selected) > 0.999


def test_a_pack_of_which_only_some_are_recorded_is_an_error(rollouts: list[Trajectory]) -> None:
    with pytest.raises(ValueError, match="selected: only 1 of 2 trajectories"):
        pack(rollouts[6:])
    assert pack([replace(t, selected=None) for t in rollouts[6:]]).selected == ()


def test_replay_of_a_model_without_indexers_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = Config()
    config.policy.path, config.indexshare.replay = str(tmp_path), True
    with pytest.raises(ConfigError, match=r"indexshare\.replay: True given, must be false with a llama model"):
        check(config)
