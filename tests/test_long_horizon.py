"""The long-sequence study: its tasks, that its comparisons are fair and affordable, and its pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.long_horizon.__main__ import FULL, HERE, QUICK, SMOLLM2, WINDOW, comparisons
from examples.long_horizon.pictures import advantage_spread, write_study
from examples.long_horizon.tasks import games, recall
from rl.compare import budget_override, check_arms, load_arms
from rl.config import Config
from rl.telemetry import Telemetry
from tests.test_compare import log_of


def test_recall_asks_again_and_pays_the_share_at_the_end():
    episode = recall(3, seed=0, questions=4, pairs=5)
    prompt = episode.reset()
    listed = dict(pair.split(":") for pair in prompt.split(" ")[:5])
    assert prompt.endswith(f" ?{episode.asked[0]}:")
    question, paid = prompt, []
    for turn in range(4):
        answer = listed[question[-2]]
        question, reward, done = episode.step(f" {answer}" if turn != 2 else answer.upper())
        paid.append((reward, done))
    assert paid == [(0.0, False)] * 3 + [(0.75, True)]
    assert recall(3, seed=0).reset() == recall(3, seed=0).reset() != recall(4, seed=0).reset()


def test_games_follow_each_other_and_pay_the_share_won_at_the_end():
    episode = games(0, seed=0, rounds=3, top=5, guesses=2)
    numbers = [game._number for game in episode.games]
    wrong = [n % 5 + 1 for n in numbers]
    assert episode.reset() == "count ? in 12345>"
    observation, reward, done = episode.step(str(numbers[0]))
    assert (observation, reward, done) == ("right\ncount ? in 12345>", 0.0, False)
    assert episode.step(str(wrong[1]))[0] in ("higher>", "lower>")
    assert episode.step("x")[0] == "what>\ncount ? in 12345>", "the second guess was the game's last"
    assert episode.step(str(wrong[2]))[2] is False
    assert episode.step(str(numbers[2])) == ("right", pytest.approx(2 / 3), True)


@pytest.mark.parametrize(
    "make", [lambda: recall(0, 0, questions=0), lambda: recall(0, 0, pairs=99), lambda: games(0, 0, top=1)]
)
def test_knobs_are_bounded(make):
    with pytest.raises(ValueError, match="given, must be"):
        make()


@pytest.mark.parametrize("study", [FULL, QUICK], ids=["full", "quick"])
def test_every_comparison_is_fair_and_fits_the_policy(study):
    for c in comparisons(study):
        overrides = [*c.overrides, *budget_override(f"tokens={c.budget}")]
        if c.overrides is SMOLLM2:
            overrides.append("policy.path=examples/tiny")  # stands for the model that is fetched
        arms = load_arms([str(HERE / f"{arm}.yaml") for arm in c.arms], overrides)
        check_arms(arms, allow_different=False)
        for arm in arms:
            config = arm.config
            assert config.prompts.max_prompt_tokens + config.rollout.max_response_tokens <= WINDOW
            assert config.step.prompts_per_step * config.step.samples_per_prompt == 32
    assert len({c.name for c in comparisons(study)}) == len(comparisons(study))


@pytest.mark.parametrize("task", ["recall", "games"])
def test_the_longest_episode_comes_to_its_end(task):
    """Every answer as long as a turn may be: 6 tokens, the last of which is the end of the turn."""
    (c,) = [c for c in comparisons(FULL) if c.name == f"{task}-256"]
    config = load_arms([str(HERE / "ppo.yaml")] * 2, list(c.overrides))[0].config
    knobs = config.prompts.knobs
    episode = {"recall": recall, "games": games}[task](0, 0, **knobs)
    episode.reset()
    tokens, done = 0, False
    while not done:
        observation, _, done = episode.step("wrong")
        tokens += config.rollout.max_turn_tokens + (0 if done else len(observation))
    assert tokens <= config.rollout.max_response_tokens
    assert config.rollout.max_turns is None


def test_the_study_is_drawn_from_what_its_runs_logged(tmp_path):
    for length in (32, 128):
        for arm in ("ppo", "grpo"):
            for seed in (0, 1):
                config = Config()
                config.algorithm.name, config.run.steps = arm, 4
                telemetry = Telemetry.open(tmp_path / f"recall-{length}" / f"{arm}-seed{seed}", config)
                telemetry.log(0, [], {"eval/success": 0.25})
                for step in range(1, 5):
                    own = {"critic/explained_variance/position_1of4": 0.5} if arm == "ppo" else {}
                    telemetry.log(
                        step,
                        [],
                        {"reward/mean": 0.1, "reward/std": 0.5, "rollout/tokens": 10.0 * step, "time/step": 1.0}
                        | {"advantages/raw_std": 0.25 * step, "policy/grad_norm": 1.0 * step}
                        | own,
                    )
                telemetry.log(4, [], {"eval/success": 0.5 + seed / 4})
                telemetry.close()
    (tmp_path / "recall-128" / "broken-seed0").mkdir()
    cut = Telemetry.open(tmp_path / "recall-128" / "sao-seed0", Config())  # 30 steps
    cut.log(1, [], {"reward/mean": 0.1})
    cut.close()
    files = write_study(tmp_path)
    assert [file.name for file in files] == ["study.json", "recall.png"]
    records = json.loads(files[0].read_text())
    assert [(r["length"], r["arm"]) for r in records] == [(32, "grpo"), (32, "ppo"), (128, "grpo"), (128, "ppo")]
    grpo, ppo = records[:2]
    assert (ppo["first"], ppo["final"], ppo["generated_tokens"]) == ([0.25, 0.25], [0.5, 0.75], [40.0, 40.0])
    assert ppo["grad_norm"] == [3.5, 3.5], "the mean of the last half"
    assert (ppo["advantage_spread"], grpo["advantage_spread"]) == ([1.75, 1.75], [0.875, 0.875])
    assert ppo["explained_variance_by_position"][0] == [0.5, None, None, None]
    assert write_study(tmp_path / "empty") == []


def test_without_scores_that_differ_there_is_no_spread_of_advantages():
    flat = log_of("ppo", 0, 0.5, metrics={"reward/std": np.zeros(4), "advantages/raw_std": np.zeros(4)})
    assert advantage_spread(flat) is None
