"""The greedy search over patterns: the algorithm on given losses, and the command on a tiny random model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexshare import search
from rl.config import ConfigError


# ------------------------------------------------------------------------------------------------ algorithm
class Losses:
    """A loss for every pattern, and what was asked for."""

    def __init__(self, seed: int) -> None:
        self.seed, self.asked = seed, []

    def __call__(self, pattern: str) -> float:
        self.asked.append(pattern)
        return random.Random(f"{self.seed}/{pattern}").random()


def test_each_round_drops_the_indexer_that_is_missed_least() -> None:
    # What a layer's indexer is worth, and layers 1 and 2 replace each other.
    worth = [9.0, 3.0, 3.5, 0.5, 2.0]

    def loss(pattern: str) -> float:
        lost = sum(w for w, letter in zip(worth, pattern, strict=True) if letter == "S")
        return lost + (10 if pattern[1:3] == "SS" else -2 if "S" in pattern[1:3] else 0)

    path = search.greedy("FFFFF", 1, loss)
    assert [t.pattern for t in path] == ["FFFSF", "FSFSF", "FSFSS", "FSSSS"]
    assert [t.loss for t in path] == [0.5, 1.5, 3.5, 19.0]


def test_equal_losses_drop_the_lowest_layer_and_a_shared_layer_stays_shared() -> None:
    assert [t.pattern for t in search.greedy("FFSF", 1, lambda _: 0.0)] == ["FSSF", "FSSS"]
    assert search.greedy("FFSF", 3, lambda _: 0.0) == []


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3), st.data())
def test_what_is_asked_for_and_what_is_found(seed: int, size: int, blocks: int, data: st.DataObject) -> None:
    start = "F" * size * blocks
    full = data.draw(st.integers(blocks, len(start)))
    losses = Losses(seed)
    path = search.greedy(start, full, losses, blocks)
    assert len(losses.asked) == len(set(losses.asked)) == search.evaluations(start, full, blocks)
    counts = [t.pattern.count("F") for t in path]
    assert counts == list(range(len(start) - 1, full - 1, -1))
    for t in path:
        assert all(t.pattern[b * size] == "F" for b in range(blocks))
        assert t.loss == losses(t.pattern)
    if blocks == 1:
        # Each pattern is the best of those that differ from the one before by one Full layer less.
        for before, t in zip([start, *(t.pattern for t in path)], path, strict=False):
            rivals = [before[:i] + "S" + before[i + 1 :] for i in range(1, len(start)) if before[i] == "F"]
            assert t.loss == min(map(losses, rivals))


def test_blocks_need_fewer_evaluations() -> None:
    start = "F" * 16
    assert search.evaluations(start, 4) == sum(range(4, 16)) == 114
    assert search.evaluations(start, 4, blocks=4) == 4 * (1 + 2 + 3)


def test_an_interrupted_search_goes_on_where_it_was() -> None:
    whole = search.greedy("FFFFFF", 2, Losses(3))
    known: dict[str, float] = {}
    losses = Losses(3)

    def remembered(pattern: str) -> float:
        if pattern not in known:
            if len(known) == stop:
                raise KeyboardInterrupt
            known[pattern] = losses(pattern)
        return known[pattern]

    stop = 7
    with pytest.raises(KeyboardInterrupt):
        search.greedy("FFFFFF", 2, remembered)
    stop = 1000
    assert search.greedy("FFFFFF", 2, remembered) == whole
    assert len(losses.asked) == search.evaluations("FFFFFF", 2)


@pytest.mark.parametrize(
    ("start", "full", "blocks", "said"),
    [
        ("FFFF", 0, 1, "full: 0 given, must be between 1, one for each block, and 4"),
        ("FFSF", 4, 1, "full: 4 given, must be between 1, one for each block, and 3, the Full layers of FFSF"),
        ("FFFF", 1, 2, "full: 1 given, must be between 2, one for each block"),
        ("FFFF", 2, 3, "blocks: 3 given, must be a divisor of the model's 4 layers"),
        ("FFFF", 2, 0, "blocks: 0 given"),
        ("FFSF", 2, 2, "layer 2 of FFSF would start one on Shared"),
        ("FSSFFF", 4, 2, "full: 4 given, but layers 0 to 2 have no 2 Full"),
        ("SFFF", 2, 1, "the first layer is Shared"),
    ],
)
def test_impossible_searches_are_refused(start: str, full: int, blocks: int, said: str) -> None:
    losses = Losses(0)
    with pytest.raises(ValueError, match=said):
        search.greedy(start, full, losses, blocks)
    assert losses.asked == []


def test_uniform_and_random_patterns_have_as_many_full_layers_as_asked() -> None:
    assert search.uniform(8, 2) == "FSSSFSSS"
    assert search.uniform(4, 4) == "FFFF"
    with pytest.raises(ValueError, match="full: 3 given, must be a divisor of 8"):
        search.uniform(8, 3)
    drawn = {search.at_random(5, 3, random.Random(i)) for i in range(200)}
    every = {"F" + "".join("F" if i in c else "S" for i in range(4)) for c in combinations(range(4), 2)}
    assert drawn == every


# ------------------------------------------------------------------------------------------------ command
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_policy_dir: Path) -> Path:
    """The random policy, with an indexer in every layer."""
    import torch
    from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

    from indexshare.pattern import adopt_anew
    from indexshare.schedule import Schedule

    torch.manual_seed(0)
    loaded = GlmMoeDsaForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)
    adopt_anew(loaded, Schedule.from_pattern("FFFFFF"))
    folder = tmp_path_factory.mktemp("full")
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_policy_dir).save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "search.yaml"
    path.write_text(
        f"run: {{out: {tmp_path}/runs}}\nmodel: {{path: {model}}}\nfull: 4\n"
        "data: {knobs: {pairs: 6, questions: 3}, documents_per_step: 1, held_out: 1}\n"
    )
    return path


def test_search_finds_evaluates_and_leaves_a_model_to_train(config: Path, tmp_path: Path, capsys) -> None:
    import torch
    from transformers import GlmMoeDsaForCausalLM

    from indexshare.pattern import indexers
    from indexshare.schedule import Schedule
    from rl import cli
    from rl.distill import held_out_loss, load_model
    from rl.documents import DocumentSource, packs
    from rl.indexshare_config import DistillConfig, SearchConfig, load

    assert cli.main(["indexshare", "search", str(config)]) == 0
    said, progress = capsys.readouterr()
    assert [line for line in progress.splitlines() if line.startswith("search  step")][-1].startswith(
        "search  step 9/9"
    )
    run = tmp_path / "runs" / "search-seed0"
    record = json.loads((run / "search.json").read_text())
    pattern = record["pattern"]
    assert pattern.count("F") == 4
    assert pattern in said
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == 5 + 4
    first = [t for t in trials if t["pattern"].count("F") == 5]
    assert record["path"][0]["loss"] == min(t["loss"] for t in first)

    # The model that is left has the pattern found, and on the calibration documents the loss that was found.
    folder = run / "policy"
    left = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert list(indexers(left)) == [i for i, letter in enumerate(pattern) if letter == "F"]
    assert Schedule.from_config(left.config).pattern == pattern
    c = load(SearchConfig, config, [f"model.path={folder}"])
    loaded, tokenizer = load_model(c.model)
    calibration = packs(DocumentSource(c.data, tokenizer).step(0), 4096)
    assert held_out_loss(loaded, calibration) == pytest.approx(record["path"][-1]["loss"], abs=1e-5)
    # And the configuration to teach it can be used as it is.
    lesson = load(DistillConfig, run / "distill.yaml", ["warmup.steps=1", "run.name=lesson"])
    assert lesson.model.path == str(folder)
    assert lesson.data == c.data


def test_a_resumed_search_evaluates_only_what_is_missing(config: Path, tmp_path: Path, monkeypatch) -> None:
    from rl import pattern_search
    from rl.indexshare_config import SearchConfig, load

    real, asked = pattern_search.loss_of, []

    def counting(model, pattern: str, documents) -> float:
        asked.append(pattern)
        if len(asked) == stop:
            raise KeyboardInterrupt
        return real(model, pattern, documents)

    monkeypatch.setattr(pattern_search, "loss_of", counting)
    stop = 4
    with pytest.raises(KeyboardInterrupt):
        pattern_search.search(load(SearchConfig, config))
    trials = tmp_path / "runs" / "search-seed0" / "trials.jsonl"
    with trials.open("a") as file:
        file.write('{"pattern": "FF')  # a kill in the middle of a line
    with pytest.raises(ConfigError, match="is there already"):
        pattern_search.search(load(SearchConfig, config))
    stop, before = 0, set(asked[:3])
    asked.clear()
    pattern_search.search(load(SearchConfig, config, ["run.resume=true"]))
    searched = asked[: 9 - 3]
    assert not before & set(searched)
    assert len({json.loads(line)["pattern"] for line in trials.read_text().splitlines()}) == 9
    # Going further with fewer Full layers is the same question, another model or other documents are not.
    with pytest.raises(ConfigError, match=r"was begun with data.seed=0, not 1"):
        pattern_search.search(load(SearchConfig, config, ["run.resume=true", "data.seed=1"]))
    asked.clear()
    pattern_search.search(load(SearchConfig, config, ["run.resume=true", "full=3"]))
    assert len(set(asked) - {"FFFFFF"}) <= 3 + 2


def test_a_mistake_is_refused_before_anything_heavy_is_imported(config: Path) -> None:
    code = (
        "import sys; from rl.cli import main;"
        f"codes = [main(['indexshare', tool, {str(config)!r}, 'run.seed=x']) for tool in ('distill', 'search')];"
        "print(codes, [m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[2, 2] []", done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["full=7"], "full: 7 given, must be between 1, one for each block, and 6, the Full layers of FFFFFF"),
        (["blocks=4"], "blocks: 4 given, must be a divisor of the model's 6 layers"),
        (["full=0"], "full: 0 given, must be between 1 and"),
        (["run.resum=true"], "run.resum: unknown key, did you mean run.resume?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(config: Path, tmp_path: Path, capsys, words: list[str], said: str) -> None:
    from rl import cli

    assert cli.main(["indexshare", "search", str(config), *words]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("longppo")]
    assert len(err) == 1
    assert err[0].startswith(f"longppo: {said}")
    assert not (tmp_path / "runs").exists()
