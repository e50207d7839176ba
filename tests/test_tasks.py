"""Procedural tasks: deterministic, right, and as long as asked."""

from __future__ import annotations

import re

import pytest

from rl.tasks import TASKS, make, score


@pytest.mark.parametrize("name", list(TASKS))
def test_same_arguments_same_example_other_arguments_another(name: str) -> None:
    assert make(name, 3, seed=0) == make(name, 3, seed=0)
    stream = [make(name, i, seed=0) for i in range(40)]
    assert len({e.prompt for e in stream}) > 20
    assert stream != [make(name, i, seed=1) for i in range(40)]
    assert all(e.task == name and e.answer and (e.prompt + e.answer).isascii() for e in stream)


def test_an_example_does_not_change_between_versions() -> None:
    assert make("arithmetic", 3, seed=0).prompt == "4+12="
    assert make("counting", 3, seed=0).prompt == "count y in dwyqwwqdyyyq>"


def test_recall_asks_for_one_of_its_pairs() -> None:
    for i in range(20):
        example = make("recall", i, seed=5)
        assert len(example.prompt) >= 384
        key = example.prompt[-2]
        assert re.findall(rf"{re.escape(key)}:(\w+) ", example.prompt) == [example.answer]


def test_difficulty_of_recall_is_the_number_of_pairs() -> None:
    assert len(make("recall", 0, seed=0, pairs=10).prompt) == 10 * 7 + 3
    long = make("recall", 0, seed=0, pairs=300, key_length=2, value_length=6)
    assert len(long.prompt) == 300 * 10 + 4
    assert len({entry.split(":")[0] for entry in long.prompt.split()}) == 301  # the keys, and the one asked with "?"


def test_the_others_have_right_answers() -> None:
    for i in range(30):
        text = make("copying", i, seed=0)
        assert text.prompt == f"copy {text.answer}>"
        letter, word = re.fullmatch(r"count (.) in (\w+)>", make("counting", i, seed=0).prompt).groups()
        assert make("counting", i, seed=0).answer == str(word.count(letter))
        a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)=", make("arithmetic", i, seed=0).prompt).groups()
        assert int(make("arithmetic", i, seed=0).answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0


def test_score_is_exact() -> None:
    assert score("abcd", "abcd") == 1.0
    assert score(" abcd\n", "abcd") == 1.0
    assert score("abcde", "abcd") == score("ABCD", "abcd") == score("", "abcd") == 0.0


def test_bad_names_and_knobs_are_named() -> None:
    with pytest.raises(ValueError, match=r"'recal'.*recall"):
        make("recal", 0, seed=0)
    with pytest.raises(ValueError, match=r"'pair'.*pairs"):
        make("recall", 0, seed=0, pair=3)
    with pytest.raises(ValueError, match="pairs: 100 given, must be 1 to 58"):
        make("recall", 0, seed=0, pairs=100)
