"""Episodes of several turns: what is a policy's token and what is not, where rewards land, what ends an episode."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from policy.model import build
from rl import environments, rewards
from rl.algorithms import targets, token_rewards
from rl.config import AlgorithmConfig, Config, ConfigError, PromptsConfig, RolloutConfig
from rl.config_load import load
from rl.environments import EnvironmentFailure, episode_return, opener
from rl.learner import per_response
from rl.prompts import HELD_OUT, PromptSource
from rl.summary import summarise
from rl.telemetry import sample as logged
from rl.train import train
from rl.trajectory import Prompt, Trajectory, pack
from rollout import episodes
from rollout.engine import Request, Sample, Sampling
from rollout.pool import RolloutPool

ROOT = Path(__file__).parents[1]
BUDGET = 8


class Scripted:
    """Answers each response with its length; ends after the episode's own number of turns, turn n paying n/4."""

    heard: dict[int, list[list[str]]]
    """By episode, what each of its players was told; a list per player."""

    def __init__(self, index: int, seed: int, turns: int) -> None:
        self.index, self.seed, self.turns, self.said = index, seed, turns, []
        type(self).heard.setdefault(index, []).append(self.said)

    def reset(self) -> str:
        return f"episode {self.index} of {self.seed}: "

    def step(self, response: str) -> tuple[str, float, bool]:
        self.said.append(response)
        n = len(self.said)
        return observed(n, response), n / 4, n == self.turns


def observed(turn: int, response: str) -> str:
    """What the scripted environment says; never twice the same in an episode."""
    return f"\n#{turn}: {len(response)} characters. "


def make(index: int, seed: int, turns: int = 3) -> Scripted:
    return Scripted(index, seed, 1 + index % turns)


@pytest.fixture(autouse=True)
def forget() -> None:
    Scripted.heard = {}


@pytest.fixture(scope="module")
def config(rollout_config: Config) -> Config:
    """The scripted environment under limits that some of its episodes meet."""
    config = deepcopy(rollout_config)
    config.prompts = PromptsConfig(source="environment", name=f"{__name__}:make", seed=5, max_prompt_tokens=64)
    config.rollout.max_response_tokens = 96
    config.rollout.max_turn_tokens = 20
    return config


@pytest.fixture(scope="module")
def pool(engine: RolloutPool, config: Config) -> RolloutPool:
    """The shared engine, asked to play."""
    return RolloutPool(config, engine.engines, engine.names, engine.shapes)


@pytest.fixture(scope="module")
def tokenizer(config: Config) -> Any:
    return AutoTokenizer.from_pretrained(config.policy.path)


def asked(config: Config, tokenizer: Any, n: int) -> list[Prompt]:
    return PromptSource(config.prompts, tokenizer).next(n)


# ------------------------------------------------------------------------------------------------ with the real engine
def test_actions_and_observations_interleave_exactly(
    pool: RolloutPool, config: Config, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response rebuilt from what the engine was asked and answered, and from what the environment said."""
    turns: dict[tuple[int, ...], tuple[Request, Sample]] = {}
    ask = RolloutPool._ask

    def recording(self: RolloutPool, requests: list[list[Request]]) -> list[list[Sample]]:
        samples = ask(self, requests)
        for request, sample in zip(requests[0], samples[0], strict=True):
            turns[tuple(request.prompt_ids)] = request, sample
        return samples

    monkeypatch.setattr(RolloutPool, "_ask", recording)
    prompts = asked(config, tokenizer, 9)
    Scripted.heard = {}
    batch = pool.generate(prompts, 1, step=0)
    seeds = set()
    for prompt, t in zip(prompts, batch, strict=True):
        ids, mask, logprobs, paid = [], [], [], []
        (said,) = Scripted.heard[t.prompt_index]
        for turn, response in enumerate(said, 1):
            request, sample = turns[(*prompt.ids.tolist(), *ids)]
            seeds.add(request.seed)
            assert request.max_tokens == min(20, 96 - len(ids))
            assert sample.text == response
            ids += sample.ids.tolist()
            mask += [True] * len(sample.ids)
            logprobs += sample.logprobs.tolist()
            paid += [0.0] * (len(sample.ids) - 1) + [turn / 4]
            seen = tokenizer(observed(turn, response), add_special_tokens=False)["input_ids"]
            if not (t.finish_reason == "stop" and turn == len(said)) and len(ids) + len(seen) <= 96:
                ids, mask = ids + seen, mask + [False] * len(seen)
                logprobs, paid = logprobs + [0.0] * len(seen), paid + [0.0] * len(seen)
        assert t.response_ids.tolist() == ids
        assert t.action_mask.tolist() == mask
        assert t.rollout_logprobs.tolist() == logprobs
        assert t.token_rewards.tolist() == paid
        assert t.prompt_ids.tolist() == prompt.ids.tolist()
        assert (t.rollout_logprobs[t.action_mask] < 0).all()
    assert len(seeds) == len(turns)
    assert {len(said) for (said,) in Scripted.heard.values()} == {1, 2, 3}
    # A decoded response would have lost these.
    special = set(tokenizer.all_special_ids)
    assert any(special & set(t.response_ids[t.action_mask][:-1].tolist()) for t in batch)


def test_logprobs_are_the_trainers_over_the_packed_episodes(pool: RolloutPool, config: Config, tokenizer: Any) -> None:
    batch = pool.generate(asked(config, tokenizer, 6), 2, step=1)
    assert sum(t.actions < len(t.response_ids) for t in batch) >= 6
    torch.set_num_threads(1)
    model = build(config.policy, config.rollout.temperature).eval()
    with torch.no_grad():
        packed = pack(batch)
        trainer = per_response(packed, model(packed)[0])
    gaps = [np.abs(q - t.rollout_logprobs)[t.action_mask] for t, q in zip(batch, trainer, strict=True)]
    assert np.concatenate(gaps).max() < 1e-4


def test_one_engine_or_two_play_the_same_episodes(pool: RolloutPool, config: Config, tokenizer: Any) -> None:
    """Two seats at the same engine: other shares, another order, other batches."""
    prompts = asked(config, tokenizer, 5)
    one = pool.generate(prompts, 2, step=2)
    two = RolloutPool(config, pool.engines * 2, pool.names * 2, pool.shapes).generate(prompts, 2, step=2)
    assert [(t.prompt_index, t.sample_index) for t in one] == [(p, s) for p in range(5) for s in range(2)]
    for a, b in zip(one, two, strict=True):
        assert (a.prompt_index, a.sample_index, a.finish_reason, a.text) == (
            b.prompt_index, b.sample_index, b.finish_reason, b.text
        )  # fmt: skip
        np.testing.assert_array_equal(a.response_ids, b.response_ids)
        np.testing.assert_array_equal(a.token_rewards, b.token_rewards)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=1e-4)
    assert len({t.text for t in one}) == 10  # samples of a prompt differ
    again = pool.generate(prompts, 2, step=3)
    assert not {t.text for t in one} & {t.text for t in again}


def test_a_run_with_an_environment_from_end_to_end(ray_session: None, config: Config, tmp_path: Path) -> None:
    """GRPO's one step: the trainer agrees with the engine, held-out episodes are others, the log can be read."""
    config = deepcopy(config)
    config.run.out, config.run.steps = str(tmp_path), 1
    config.step.prompts_per_step, config.step.samples_per_prompt, config.step.optimizer_steps = 3, 2, 1
    config.algorithm.name, config.algorithm.whiten = "grpo", False
    config.reward.function = "rl.environments:episode_return"
    config.eval.prompts = 3
    run = train(config)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = next(m for m in metrics if "reward/mean" in m)
    assert step["mismatch/max_abs"] < 1e-4
    assert 1 < step["rollout/turns"] <= 3
    assert step["rollout/observation_tokens"] > 0
    assert set(Scripted.heard) == {0, 1, 2} | {HELD_OUT + i for i in range(3)}
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    dialogue = next(s for s in samples if s["prompt_index"] == 1 and s["sample_index"] == 0)
    (first, *_), *_ = Scripted.heard[1][-2:]
    assert dialogue["response"].startswith(f"{first}\n[{observed(1, first)}]")
    assert dialogue["prompt"] == "episode 1 of 5: "


# ------------------------------------------------------------------------------------------------ limits
LETTERS = {c: i for i, c in enumerate("abcdefghij", 10)}


class Turns:
    """Says its observations in turn, pays 1 each, and is done after the last."""

    def __init__(self, observations: list[str]) -> None:
        self.left = list(observations)

    def reset(self) -> str:
        return "go"

    def step(self, response: str) -> tuple[str, float, bool]:
        said = self.left.pop(0)
        return said, 1.0, not self.left


def played(observations: list[str], responses: list[int], **limits: int) -> tuple[episodes.Episode, list[int]]:
    """An episode in which the policy wants to say so many tokens in turn; and how many it was allowed."""
    prompt = Prompt(0, np.array([1, 2], np.int32), "go")
    start = lambda index: environments.Checked(lambda: Turns(observations), "turns")  # noqa: E731
    episode = episodes.begin(start, prompt, 0)
    wanted, allowed = iter(responses), []

    def ask(requests: list[list[Request]]) -> list[list[Sample]]:
        ((request,),) = requests
        allowed.append(request.max_tokens)
        n = min(request.max_tokens, next(wanted))
        return [[Sample(np.full(n, 7, np.int32), np.full(n, -1.0, np.float32), "stop", "x" * n, 0)]]

    episodes.play(
        [[episode]], RolloutConfig(**limits), Sampling(0, 0, 1.0), ask, lambda text: [LETTERS[c] for c in text]
    )
    return episode, allowed


@pytest.mark.parametrize(
    ("observations", "responses", "limits", "ids", "allowed", "finish"),
    [
        # done: the last observation is nobody's to answer
        (["ab", "c"], [2, 1], {"max_response_tokens": 9}, "77ab7", [9, 5], "stop"),
        (["ab"], [9], {"max_response_tokens": 4}, "7777", [4], "stop"),
        # cut by turns: the observation stays, for the value after it
        (["ab", "c", "d"], [1, 1], {"max_response_tokens": 9, "max_turns": 2}, "7ab7c", [9, 6], "length"),
        # cut by tokens: within a response, by an observation that fills the rest, by one that does not fit
        (["ab", "c"], [1, 9], {"max_response_tokens": 9, "max_turns": 2}, "7ab777777", [9, 6], "stop"),
        (["ab", "c", "d"], [1, 9], {"max_response_tokens": 9}, "7ab777777", [9, 6], "length"),
        (["abc", "d"], [2], {"max_response_tokens": 5}, "77abc", [5], "length"),
        (["abcd", "d"], [2], {"max_response_tokens": 5}, "77", [5], "length"),
        # a turn's own limit ends the turn, not the episode; nothing said is nothing written
        (["a", "", "b"], [9, 9, 1], {"max_response_tokens": 9, "max_turn_tokens": 3}, "777a7777", [3, 3, 2], "stop"),
    ],
)
def test_what_ends_an_episode_and_what_is_left(
    observations: list[str], responses: list[int], limits: dict[str, int], ids: str, allowed: list[int], finish: str
) -> None:
    episode, given = played(observations, responses, **limits)
    t = episode.trajectory(version=3)
    assert "".join("7" if i == 7 else "abcdefghij"[i - 10] for i in t.response_ids) == ids
    assert given == allowed
    assert t.finish_reason == finish
    assert len(t.response_ids) <= limits["max_response_tokens"]
    assert t.action_mask.tolist() == [c == "7" for c in ids]
    assert t.rollout_logprobs.tolist() == [-1.0 if c == "7" else 0.0 for c in ids]
    said = np.minimum(given, responses)
    last_of_turn = np.nonzero(t.action_mask)[0][np.cumsum(said) - 1]
    assert t.token_rewards.tolist() == [float(i in last_of_turn) for i in range(len(ids))]
    assert t.policy_version == 3


def test_the_text_is_the_whole_dialogue() -> None:
    episode, _ = played(["ab", "", "c"], [1, 2, 1], max_response_tokens=9)
    t = replace(episode.trajectory(0), score=3.0)
    assert t.text == "x\n[ab]\nxx\nx\n[c]"
    assert logged(t, 1, "train")["response"] == t.text


# ------------------------------------------------------------------------------------------------ learning
def episode(index: int, sample: int, paid: list[float]) -> Trajectory:
    """Actions at 0, 1, 4 and observations at 2, 3; rewards at the ends of the two turns."""
    return Trajectory(
        prompt_index=index,
        sample_index=sample,
        prompt_ids=np.zeros(2, np.int32),
        response_ids=np.zeros(5, np.int32),
        action_mask=np.array([1, 1, 0, 0, 1], bool),
        rollout_logprobs=np.zeros(5, np.float32),
        finish_reason="stop",
        policy_version=0,
        token_rewards=np.array([0, paid[0], 0, 0, paid[1]], np.float32),
        values=np.zeros(6, np.float32),
        score=sum(paid),
    )


def test_turn_rewards_reach_their_actions_in_ppo() -> None:
    t = episode(0, 0, [0.5, 2.0])
    a = AlgorithmConfig(whiten=False)
    np.testing.assert_array_equal(token_rewards(t, a, BUDGET), [0, 0.5, 0, 0, 2])  # 2.5 in all: not counted twice
    result = targets([t], a, BUDGET)
    np.testing.assert_allclose(result.trajectories[0].advantages, [2.5, 2.5, 0, 0, 2.0])
    np.testing.assert_allclose(result.trajectories[0].value_targets, [2.5, 2.5, 0, 0, 2.0])
    np.testing.assert_array_equal(result.returns[0][t.action_mask], [2.5, 2.5, 2.0])
    # Under gamma and lambda the successor of action 1 is action 4: observations cost no time.
    late = targets([t], AlgorithmConfig(whiten=False, gamma=0.5, lambda_policy="1.0"), BUDGET).trajectories[0]
    np.testing.assert_allclose(late.advantages, [0.75, 1.5, 0, 0, 2.0])


def test_a_penalty_for_length_lands_on_the_last_action() -> None:
    a = AlgorithmConfig(overlong_buffer=6)  # 5 tokens of 8: half of it
    np.testing.assert_array_equal(token_rewards(episode(0, 0, [0.5, 2.0]), a, BUDGET), [0, 0.5, 0, 0, 1.5])


def test_grpo_compares_totals() -> None:
    paid = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    result = targets([episode(0, i, p) for i, p in enumerate(paid)], AlgorithmConfig(name="grpo", whiten=False), BUDGET)
    for t, sign in zip(result.trajectories, (1, 1, -1, -1), strict=True):
        np.testing.assert_allclose(t.advantages, sign * 0.8660 * t.action_mask, atol=1e-4)


def test_the_score_is_the_sum_of_what_was_paid() -> None:
    function = rewards.resolve("rl.environments:episode_return")
    batch = [episode(0, 0, [0.5, 2.0]), episode(1, 0, [-1.0, 0.25])]
    assert rewards.score(function, batch) == [2.5, -0.75]
    with pytest.raises(ValueError, match=r"\(prompt 1, sample 0\) has no rewards"):
        episode_return([batch[0], replace(batch[1], token_rewards=None)])


def test_turns_are_counted() -> None:
    metrics = summarise([episode(0, 0, [0, 0]), replace(episode(1, 0, [0, 0]), action_mask=np.ones(5, bool))])
    assert metrics["rollout/turns"] == 1.5
    assert metrics["rollout/observation_tokens"] == 1
    assert "rollout/turns" not in summarise([replace(episode(0, 0, [0, 0]), token_rewards=None)])


# ------------------------------------------------------------------------------------------------ prompts
def test_a_stream_of_episodes_repeats_and_holds_out(config: Config, tokenizer: Any) -> None:
    one, other = (PromptSource(config.prompts, tokenizer, per_step=2, held_out=2) for _ in range(2))
    prompts = one.next(5)
    assert [p.text for p in prompts] == [f"episode {i} of 5: " for i in range(5)]
    assert [p.index for p in prompts] == list(range(5))
    other.load_state({"position": 3, "dropped": 0})
    assert other.next(2)[0].text == prompts[3].text
    assert [p.text for p in one.held_out(2)] == [f"episode {HELD_OUT + i} of 5: " for i in range(2)]
    assert [p.index for p in one.held_out(2)] == [HELD_OUT, HELD_OUT + 1]


def test_an_episode_that_begins_otherwise_the_second_time_is_refused() -> None:
    config = PromptsConfig(source="environment", name=f"{__name__}:make", seed=5)
    with pytest.raises(EnvironmentFailure, match=r"episode 3: reset returned .*the same index and seed must give"):
        episodes.begin(opener(config), Prompt(3, np.zeros(1, np.int32), "another prompt"), 0)


# ------------------------------------------------------------------------------------------------ bad environments
class Bad:
    """Does one thing wrong."""

    def __init__(self, prompt: Any = "p", answer: Any = ("o", 0.0, False)) -> None:
        self.prompt, self.answer = prompt, answer

    def reset(self) -> Any:
        return self.prompt

    def step(self, response: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def bad(index: int, seed: int, what: str) -> Any:
    if what == "raises":
        raise KeyError("no such\ngame")
    if what == "none":
        return None
    return Bad(**{"number": {"prompt": 3}, "nothing": {"prompt": ""}, "surrogate": {"prompt": "\ud800"}}[what])


NOT_A_NUMBER = 3


@pytest.mark.parametrize(("name", "knobs", "message"), [
    ("nowhere:make", {}, r"prompts.name: 'nowhere:make' given, must name a function: ModuleNotFoundError: No module"),
    (f"{__name__}:mak", {}, r"prompts.name: .*has no attribute 'mak'"),
    (f"{__name__}:NOT_A_NUMBER", {}, r"prompts.name: .*it is a int"),
    (f"{__name__}:make", {"turn": 1}, r"episode 0: the factory raised TypeError: .*'turn'"),
    (f"{__name__}:bad", {"what": "raises"}, r"test_environments:bad, episode 0: the factory raised KeyError: 'no such"),
    (f"{__name__}:bad", {"what": "none"}, r"episode 0: reset raised AttributeError: 'NoneType'"),
    (f"{__name__}:bad", {"what": "number"}, r"episode 0: reset returned 3, must be a string"),
    (f"{__name__}:bad", {"what": "nothing"}, r"episode 0: reset returned '', must be a prompt"),
    (f"{__name__}:bad", {"what": "surrogate"}, r"episode 0: reset returned '\\ud800', must be text"),
    ("examples.guessing:make", {"top": 1}, r"ValueError: top: 1 given, must be 2 to 9"),
])  # fmt: skip
def test_a_wrong_factory_is_refused_before_a_run_starts(
    tokenizer: Any, name: str, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PromptSource(PromptsConfig(source="environment", name=name, knobs=knobs), tokenizer)
    assert str(caught.value).startswith("prompts.name")
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_game.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'broken_game:make' given, must name a function: SyntaxError") as caught:
        opener(PromptsConfig(source="environment", name="broken_game:make"))
    assert "\n" not in str(caught.value)
    assert "broken_game" not in sys.modules


@pytest.mark.parametrize(("answer", "message"), [
    (None, "returned None, must be (observation, reward, done)"),
    ("abc", "returned 'abc', must be (observation, reward, done)"),
    (("o", 1.0, False, {}), "must be (observation, reward, done)"),
    ((3, 1.0, False), "returned 3, must be a string"),
    (("\ud800", 1.0, False), "must be text"),
    (("o", "high", False), "returned reward 'high', must be a number"),
    (("o", None, False), "returned reward None, must be a number"),
    (("o", float("nan"), False), "returned reward nan, must be finite"),
    (("o", 1.0, "no"), "returned done='no', must be true or false"),
    (ZeroDivisionError("two\nlines"), "raised ZeroDivisionError: two lines"),
])  # fmt: skip
def test_what_a_step_may_not_answer(answer: Any, message: str) -> None:
    environment = environments.Checked(lambda: Bad(), "games:make, episode 4")
    environment.step("fine")
    environment._inner.answer = answer
    with pytest.raises(EnvironmentFailure) as caught:
        environment.step("a")
    assert str(caught.value).startswith("environment games:make, episode 4: step 2 ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(answer, Exception) == isinstance(caught.value.__cause__, ZeroDivisionError)


# ------------------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize(("overrides", "message"), [
    (["reward.function=rl.rewards.exact:score"], "reward.function: .*rl.environments:episode_return with prompts.sour"),
    (["prompts.source=task", "prompts.name=recall"], "reward.function: .*another with prompts.source=task"),
    (["prompts.name=guessing"], "prompts.name: 'guessing' given, must be module:function"),
    (["rollout.max_turn_tokens=41"], "rollout.max_turn_tokens: 41 given, must be at most max_response_tokens = 40"),
    (["rollout.max_turns=0"], "rollout.max_turns: 0 given, must be between 1"),
])  # fmt: skip
def test_settings_that_do_not_fit_an_environment(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load(ROOT / "configs/guessing_ppo.yaml", overrides)


@pytest.mark.parametrize("key", ["rollout.max_turns", "rollout.max_turn_tokens"])
def test_without_an_environment_there_are_no_turns(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: 2 given, must be null with prompts.source=task"):
        load(ROOT / "configs/ppo.yaml", [f"{key}=2"])


# ------------------------------------------------------------------------------------------------ the example
def guesses(start: Any, index: int, listen: bool) -> float:
    """Bisection, or the best without listening: three different numbers."""
    game, low, high = start(index), 1, 5
    game.reset()
    for blind in (2, 3, 4):
        guess = (low + high) // 2 if listen else blind
        said, reward, done = game.step(f"{guess}")
        if done:
            return reward
        low, high = (guess + 1, high) if said == "higher>" else (low, guess - 1)
    return 0.0


def test_the_guessing_game_needs_its_hints() -> None:
    start = opener(load(ROOT / "configs/guessing_grpo.yaml").prompts)
    assert np.mean([guesses(start, i, True) for i in range(200)]) == 1
    for first in (0, HELD_OUT):
        assert np.mean([guesses(start, first + i, False) for i in range(125)]) == pytest.approx(0.6)
    game = start(7)
    assert game.reset() == "count ? in 12345>"
    assert game.step("two") == ("what>", 0.0, False)
    assert {tuple(start(i).step("3")) for i in range(50)} == {
        ("right", 1.0, True), ("higher>", 0.0, False), ("lower>", 0.0, False)
    }  # fmt: skip
