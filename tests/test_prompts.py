"""Prompts: tokenized once, with one BOS; a stream that goes on where it was; bad files refused before a run starts."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl.config import ConfigError, PromptsConfig
from rl.prompts import HELD_OUT, PromptSource
from rl.rewards import reasoning

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def characters(chat: bool = True) -> PreTrainedTokenizerFast:
    """A character tokenizer that writes BOS both by itself and in its chat template: the trap of worked value 16."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(c): c - 29 for c in range(32, 127)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def jsonl(path: Path, records: list[Any]) -> PromptsConfig:
    """A configuration that reads `records` from a file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return PromptsConfig(source="jsonl", path=str(path), max_prompt_tokens=64)


def numbered(path: Path, n: int) -> PromptsConfig:
    """A file of `n` prompts `p0`, `p1`, ..."""
    return jsonl(path, [{"prompt": f"p{i}", "answer": i, "task": "t"} for i in range(n)])


def test_plain_text_has_the_tokenizers_one_bos(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": "c"}])
    prompt = PromptSource(config, characters()).next(1)[0]
    assert prompt.ids.tolist() == [1, ord("a") - 29, ord("b") - 29]
    assert (prompt.text, prompt.answer) == ("ab", "c")


@pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
def test_worked_value_16_a_chat_template_that_writes_bos(tmp_path: Path, prompt: Any) -> None:
    config = jsonl(tmp_path / "p.jsonl", [{"prompt": prompt}])
    config.chat = isinstance(prompt, str)
    tokenizer = characters()
    ids = PromptSource(config, tokenizer).next(1)[0].ids.tolist()
    messages = [{"role": "user", "content": "ab"}]
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids.count(1) == 1


def test_a_source_goes_on_where_its_state_was_taken(tmp_path: Path) -> None:
    config = numbered(tmp_path / "p.jsonl", 10)
    one = PromptSource(config, characters(), held_out=3)
    one.next(5)
    other = PromptSource(config, characters(), held_out=3)
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.position == 5
    for _ in range(4):
        assert [(p.index, p.text) for p in one.next(3)] == [(p.index, p.text) for p in other.next(3)]


def test_a_file_is_seen_whole_in_every_epoch_and_in_another_order(tmp_path: Path) -> None:
    source = PromptSource(numbered(tmp_path / "p.jsonl", 12), characters(), held_out=2)
    first, second = ([p.text for p in source.next(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(10))
    assert first != second
    assert [p.index for p in source.next(2)] == [20, 21]


def test_held_out_prompts_are_the_files_last_and_never_train(tmp_path: Path) -> None:
    source = PromptSource(numbered(tmp_path / "p.jsonl", 8), characters(), held_out=3)
    held = source.held_out(3)
    assert [p.text for p in held] == ["p5", "p6", "p7"]
    assert [p.text for p in source.held_out(2)] == ["p5", "p6"]
    trained = source.next(40)
    assert not {p.text for p in held} & {p.text for p in trained}
    assert not {p.index for p in held} & {p.index for p in trained}


@pytest.mark.parametrize("config", [
    PromptsConfig(name="recall", knobs={"pairs": 4}),
    PromptsConfig(name="instructions", max_prompt_tokens=400),
    PromptsConfig(source="reasoning_gym", name="word_sorting", max_prompt_tokens=4000),
])  # fmt: skip
def test_procedural_streams_repeat_and_hold_out(config: PromptsConfig) -> None:
    one, other = (PromptSource(config, characters(), per_step=4, held_out=4) for _ in range(2))
    prompts = one.next(8)
    assert [p.text for p in prompts] == [p.text for p in other.next(3) + other.next(5)]
    assert len({p.text for p in prompts}) == 8
    assert [p.index for p in prompts] == list(range(8))
    held = one.held_out(4)
    assert [p.index for p in held] == [HELD_OUT + i for i in range(4)]
    assert not {p.text for p in held} & {p.text for p in prompts}
    config.seed += 1
    assert PromptSource(config, characters()).next(1)[0].text != prompts[0].text


def test_a_reasoning_gym_answer_is_scored_where_the_trajectory_went() -> None:
    config = PromptsConfig(source="reasoning_gym", name="chain_sum", knobs={"max_terms": 2}, max_prompt_tokens=4000)
    prompt = PromptSource(config, characters()).next(3)[-1]
    identity = reasoning.Identity(**json.loads(prompt.answer))
    assert (identity.index, identity.knobs) == (2, {"max_terms": 2})
    assert prompt.text == reasoning.question(identity)


@pytest.mark.skipif(any(d.name == "pycosat" for d in distributions()), reason="pycosat is installed")
def test_the_task_that_needs_a_compiler_says_so() -> None:
    with pytest.raises(ConfigError, match=r"zebra_puzzles.*pip install pycosat"):
        PromptSource(PromptsConfig(source="reasoning_gym", name="zebra_puzzles"), characters())


def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * n} for n in (3, 63, 64, 200)])
    source = PromptSource(config, characters(), per_step=2)
    assert source.dropped == 2
    assert {len(p.ids) for p in source.next(4)} == {4, 64}
    assert PromptSource(config, characters(), window=10).dropped == 3


def test_an_endless_task_passes_over_what_is_too_long_and_counts_it() -> None:
    config = PromptsConfig(name="arithmetic", knobs={"largest": 200}, max_prompt_tokens=7)
    source = PromptSource(config, characters(), per_step=4)
    prompts = source.next(50)
    assert all(len(p.ids) <= 7 for p in prompts)
    assert source.dropped == source.position - 50 > 0
    assert source.state() == {"position": source.position, "dropped": source.dropped}


def test_the_probe_is_the_beginning_of_a_prompt_and_moves_nothing() -> None:
    source = PromptSource(PromptsConfig(), characters())
    probe = source.probe(16)
    assert source.position == 0
    np.testing.assert_array_equal(probe.ids, source.next(1)[0].ids[:16])


@pytest.mark.parametrize(("lines", "held_out", "per_step", "message"), [
    ("", 0, 1, r"prompts.path: .*empty"),
    ("\n\n", 0, 1, r"prompts.path: .*empty"),
    ('{"prompt": "a"}\n{"prompt": 3}\n', 0, 1, r"line 2: `prompt` must be"),
    ('{"prompt": []}\n', 0, 1, r"line 1: `prompt` must be"),
    ('[1]\n', 0, 1, r"line 1: `prompt` must be"),
    ('{"prompt": "a"', 0, 1, r"line 1: not JSON"),
    ('{"prompt": "a", "task": 1}\n', 0, 1, r"line 1: `task` must be a string, 1 given"),
    ('{"prompt": "a"}\n' * 4, 0, 5, r"has 4 training prompts .* a step needs 5 \(step.prompts_per_step\)"),
    ('{"prompt": "a"}\n' * 4, 2, 3, r"has 2 training prompts .* a step needs 3"),
    ('{"prompt": "a"}\n' * 4, 4, 1, r"eval.prompts: 4 given, must be fewer than the 4"),
    ('{"prompt": "%s"}\n' % ("a" * 64), 0, 1, r"all 1 prompts are longer than the window"),
])  # fmt: skip
def test_bad_files(tmp_path: Path, lines: str, held_out: int, per_step: int, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(lines)
    config = PromptsConfig(source="jsonl", path=str(path), max_prompt_tokens=64)
    with pytest.raises(ConfigError, match=message) as caught:
        PromptSource(config, characters(), per_step=per_step, held_out=held_out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "message"), [
    (PromptsConfig(source="hub"), r"prompts.source: 'hub' given, must be one of task, reasoning_gym, jsonl"),
    (PromptsConfig(source="jsonl"), r"prompts.path: None given"),
    (PromptsConfig(source="jsonl", path="no/such.jsonl"), r"prompts.path: 'no/such.jsonl' given"),
    (PromptsConfig(name="recal"), r"'recal' given, must be one of recall"),
    (PromptsConfig(knobs={"pair": 3}), r"unknown knob 'pair'"),
    (PromptsConfig(name="instructions", knobs={"kinds": "rhyme"}), r"'rhyme' given, must be of lowercase"),
    (PromptsConfig(source="reasoning_gym", name="word_sort"), r"reasoning_gym 'word_sort'.*not registered"),
    (PromptsConfig(source="reasoning_gym", name="chain_sum", knobs={"terms": 1}), r"unexpected keyword"),
    (PromptsConfig(max_prompt_tokens=9), r"window of 9 tokens given, but none of 1000 prompts"),
    (PromptsConfig(chat=True), r"prompts.chat: True given, must be false"),
])  # fmt: skip
def test_bad_settings(config: PromptsConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PromptSource(config, characters(chat=False))
    assert "\n" not in str(caught.value)


def test_chat_messages_need_a_template(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ConfigError, match="line 1: chat messages given, but the tokenizer has no chat template"):
        PromptSource(config, characters(chat=False))
