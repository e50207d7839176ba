"""Rewards: any function may score, and none may hand on what is no score."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rl import rewards
from rl.config import ConfigError
from rl.rewards import RewardError, exact, instructions, reasoning
from rl.tasks_text import CONSTRAINTS, make, satisfied
from rl.tasks_text import instructions as instruction
from rl.trajectory import FinishReason, Trajectory


def trajectory(text: str, answer: str = "", prompt: int = 0, finish: FinishReason = "stop") -> Trajectory:
    """A trajectory of which only the text matters."""
    none = np.zeros(0, np.float32)
    ids = np.zeros(0, np.int32)
    return Trajectory(prompt, 1, ids, ids, none.astype(bool), none, finish, 0, text=text, answer=answer)


def test_exact_strips_and_nothing_more() -> None:
    given = [("4 \n", "4"), ("4.", "4"), ("the answer is 4", "4"), ("", "4")]
    assert exact.score([trajectory(text, answer) for text, answer in given]) == [1, 0, 0, 0]


def test_resolve_and_score() -> None:
    function = rewards.resolve("rl.rewards.exact:score")
    assert rewards.score(function, [trajectory("a", "a"), trajectory("a", "b")]) == [1.0, 0.0]


@pytest.mark.parametrize(("name", "message"), [
    ("rl.rewards.exact", "must be `module:function`"),
    ("rl.rewards.exactly:score", "No module named"),
    ("rl.rewards.exact:scores", "has no attribute 'scores'"),
    ("rl.rewards.reasoning:SIZE", "it is a int"),
])  # fmt: skip
def test_resolve_refuses(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function: '{name}' given.*{message}"):
        rewards.resolve(name)


def raises(trajectories: Sequence[Trajectory]) -> list[float]:
    """A reward with a bug."""
    raise KeyError("gold")


@pytest.mark.parametrize(("function", "message"), [
    (raises, r"test_rewards:raises raised KeyError: 'gold'"),
    (lambda ts: [1.0], r"returned 1 scores for 2 trajectories"),
    (lambda ts: [1.0, float("nan")], r"returned nan for trajectory \(prompt 7, sample 1\)"),
    (lambda ts: [1.0, float("-inf")], r"returned -inf for trajectory \(prompt 7, sample 1\)"),
    (lambda ts: np.array([np.inf, 0]), r"returned inf for trajectory \(prompt 0, sample 1\)"),
    (lambda ts: [1.0, None], r"returned None for trajectory \(prompt 7, sample 1\), must be a number"),
    (lambda ts: 1.0, r"raised TypeError"),
])  # fmt: skip
def test_what_is_no_score_names_the_function_and_the_trajectory(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        rewards.score(function, [trajectory("a"), trajectory("b", prompt=7)])
    assert function.__name__ in str(caught.value)


def test_a_reward_that_raises_keeps_its_cause() -> None:
    with pytest.raises(RewardError) as caught:
        rewards.score(raises, [trajectory("a")])
    assert isinstance(caught.value.__cause__, KeyError)


def word_sorting(text: Callable[[str], str]) -> float:
    """The score of a text made from the right answer."""
    identity = reasoning.Identity("word_sorting", 3, 5, {"max_words": 4})
    right = reasoning._find(identity)[1]["answer"]
    return reasoning.score([trajectory(text(right), identity.dumps())])[0]


def test_reasoning_extracts_before_it_scores() -> None:
    assert word_sorting(lambda right: f"I sort them.\n<answer>\n{right}\n</answer>") == 1
    assert word_sorting(lambda right: f"<answer>{right}</answer> no: <answer>x</answer>") < 0.1
    # What the task would score by length if it saw the whole text.
    assert word_sorting(lambda right: right) == 0
    assert word_sorting(lambda right: "<answer></answer>") < 0.1


@pytest.mark.parametrize("task", ["countdown", "propositional_logic"])
def test_no_answer_earns_nothing_even_where_the_task_is_generous(task: str) -> None:
    identity = reasoning.Identity(task, 0, 0, {})
    assert reasoning.score([trajectory("I do not know", identity.dumps())]) == [0.0]


def test_a_stream_of_entries_has_no_end_and_no_seam() -> None:
    last, first = (reasoning.Identity("chain_sum", 0, reasoning.SIZE + i, {}) for i in (-1, 0))
    shifted = reasoning.Identity("chain_sum", reasoning.SIZE - 1, 0, {})
    assert reasoning.question(last) == reasoning.question(shifted)
    assert reasoning.question(first) != reasoning.question(last)


GOOD_AND_BAD = {
    "lowercase": ("the moon is very bright.", "The moon is very bright."),
    "uppercase": ("THE MOON IS VERY BRIGHT.", "THE MOON IS VERY bright."),
    "include": ("a River runs by the sea", "all rivers run to the sea"),
    "begin": ("River water runs very fast", "the river runs very fast"),
    "at_most": ("one two three four five", "one two three four five six"),
    "no_comma": ("one two three four five", "one, two three four five"),
    "quotes": ('"one two three four five"', '"one two three" four five'),
    "question": ("is the moon very bright?", "is the moon very bright? yes."),
    "exclamation": ("the moon is very bright!", "the moon! is very bright"),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_each_constraint(kind: str) -> None:
    argument = {"include": "river", "begin": "river", "at_most": "5"}.get(kind, "")
    good, bad = GOOD_AND_BAD[kind]
    answer = json.dumps([[kind, argument]])
    assert satisfied(f" {good}\n", answer) == 1
    assert satisfied(bad, answer) == 0
    assert satisfied("", answer) == 0


def test_constraints_add_up_and_few_words_are_no_answer() -> None:
    both = json.dumps([["begin", "river"], ["exclamation", ""]])
    texts = ["River water runs fast today!", "River water runs fast today.", "Water runs fast today!", "River!"]
    assert [satisfied(text, both) for text in texts] == [1, 0, 0, 0]


def test_a_response_that_was_cut_off_meets_nothing() -> None:
    answer = json.dumps([["no_comma", ""]])
    text = "one two three four five"
    assert instructions.score([trajectory(text, answer), trajectory(text, answer, finish="length")]) == [1, 0]


def test_instructions_say_what_is_checked_and_repeat() -> None:
    example = instruction(random.Random(1), kinds="include, question", constraints=2)
    checks = dict(json.loads(example.answer))
    assert set(checks) == {"include", "question"}
    assert f'"{checks["include"]}"' in example.prompt
    assert example.task == "include+question"
    assert make("instructions", 3, 0) == make("instructions", 3, 0) != make("instructions", 4, 0)
    with pytest.raises(ValueError, match="constraints: 3 given, must be 1 to the 2 kinds"):
        instruction(random.Random(1), kinds="include,question", constraints=3)
