"""Where prompts come from: a procedural task, a reasoning-gym task, a JSONL file, an environment; one stream with a
position.

Prompt i of a stream is a pure function of the configuration and i, so that the position is all a checkpoint needs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.config import Config, ConfigError, PromptsConfig
from rl.trajectory import Prompt

HELD_OUT = 1_000_000_000
"""Held-out prompts of an endless task are its examples from here on, where no training run arrives."""

PATIENCE = 1000
"""So many prompts of an endless task in a row may be too long before the task counts as having none that fits."""

PROBE_TOKENS = 16
"""Length of the probe, at most: long enough to touch every weight, short enough to cost nothing."""


@dataclass(frozen=True)
class Record:
    """A prompt before it is tokenized: plain text, or chat messages with `role` and `content`."""

    prompt: str | list[dict[str, str]]
    answer: str = ""
    task: str = ""


@dataclass(frozen=True)
class Records:
    """What a source offers. Indices of `training` have no end, those of `held_out` end where its source does."""

    training: Callable[[int], Record]
    held_out: Callable[[int], Record]
    size: int | None = None
    """How many different training prompts there are; None: as many as asked for."""


class PromptSource:
    """Training prompts one after another, and held-out ones that never occur among them.

    `dropped` counts the prompts left out so far because they are longer than the window.
    """

    def __init__(
        self,
        config: PromptsConfig,
        tokenizer: Any,
        *,
        per_step: int = 1,
        held_out: int = 0,
        window: int | None = None,
    ):
        """Raises ConfigError if there are fewer than `per_step` training and `held_out` held-out prompts that
        have at most `window` tokens (or `max_prompt_tokens`, whichever is less)."""
        if config.source not in SOURCES:
            raise _error("source", config.source, f"one of {', '.join(SOURCES)}")
        self._config, self._tokenizer = config, tokenizer
        self._window = min(config.max_prompt_tokens, window or config.max_prompt_tokens)
        if config.chat and not getattr(tokenizer, "chat_template", None):
            raise _error("chat", True, "false: the tokenizer of policy.path has no chat template")
        self.position = 0
        self.dropped = 0
        records, too_long = SOURCES[config.source](config, held_out, self._fits)
        self._records = records
        self._dropped_at_start = self.dropped = too_long
        if records.size is not None and records.size < per_step:
            raise ConfigError(
                f"prompts.path: {config.path} has {records.size} training prompts of at most {self._window} tokens"
                f" ({held_out} are held out, {too_long} are longer): a step needs {per_step}"
                " (step.prompts_per_step)"
            )
        self._held_out = self._take(records.held_out, 0, held_out)[0]
        self._take(records.training, 0, per_step)

    @classmethod
    def open(cls, config: Config) -> PromptSource:
        """The source that an experiment names, with its policy's tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(config.policy.path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.path: {config.policy.path!r} given, must hold a tokenizer: {_one_line(error)}"
            ) from error
        longest, window = config.rollout.max_model_len, config.prompts.max_prompt_tokens
        return cls(
            config.prompts,
            tokenizer,
            per_step=config.step.prompts_per_step,
            held_out=config.eval.prompts if config.eval.every else 0,
            window=longest - config.rollout.max_response_tokens if longest is not None else window,
        )

    def next(self, n: int) -> list[Prompt]:
        """The next `n` training prompts. Those that are too long are passed over and counted."""
        prompts, self.position, passed = self._take(self._records.training, self.position, n)
        self.dropped += passed
        return prompts

    def held_out(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts, the same at every call."""
        if n > len(self._held_out):
            more, _, _ = self._take(self._records.held_out, 0, n)
            self._held_out = more
        return self._held_out[:n]

    def probe(self, tokens: int = PROBE_TOKENS) -> Prompt:
        """The beginning of the first training prompt: what trainer and engine both score after a weight update."""
        first = self._take(self._records.training, 0, 1)[0][0]
        return replace(first, ids=first.ids[:tokens])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special ones by their names."""
        return self._tokenizer.batch_decode([[i] for i in ids])

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"position": self.position, "dropped": self.dropped}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        self.position, self.dropped = state["position"], state["dropped"]

    def _take(self, record: Callable[[int], Record], position: int, n: int) -> tuple[list[Prompt], int, int]:
        """`n` prompts that fit, from `position` on; the position after them; how many were passed over."""
        prompts: list[Prompt] = []
        start, misses = position, 0
        while len(prompts) < n:
            prompt = self._prompt(position, record)
            position += 1
            if len(prompt.ids) <= self._window:
                prompts.append(prompt)
                misses = 0
                continue
            misses += 1
            if misses == PATIENCE:
                raise ConfigError(
                    f"prompts.max_prompt_tokens: window of {self._window} tokens given, but none of {PATIENCE} prompts"
                    f" of {self._config.source} {self._config.name!r} fits (the last has {len(prompt.ids)})"
                )
        return prompts, position, position - start - n

    def _prompt(self, position: int, record: Callable[[int], Record]) -> Prompt:
        source = record(position)
        ids, text = self._tokens(source.prompt)
        # A held-out prompt has an identity of its own, so that its samples get seeds of their own. Of an environment it
        # is the episode's index, by which rollouts find the episode again.
        index = position + HELD_OUT if record is self._records.held_out else position
        return Prompt(index, ids, text, source.task, source.answer)

    def _tokens(self, prompt: str | list[dict[str, str]]) -> tuple[np.ndarray, str]:
        if isinstance(prompt, str) and not self._config.chat:
            ids = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
            return np.asarray(ids, np.int32), prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        # The template writes BOS itself. Rendering to text and tokenizing that would write a second one.
        ids = self._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return np.asarray(ids, np.int32), prompt if isinstance(prompt, str) else messages[-1]["content"]

    def _fits(self, record: Record, where: str) -> bool:
        """Whether a file's record fits the window; an unusable one is an error that names its line."""
        if not isinstance(record.prompt, str) and not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"{where}: chat messages given, but the tokenizer has no chat template")
        length = len(self._tokens(record.prompt)[0])
        if not length:
            raise ConfigError(f"{where}: the prompt has no tokens")
        return length <= self._window


Fits = Callable[[Record, str], bool]


def _task(config: PromptsConfig, held_out: int, fits: Fits) -> tuple[Records, int]:
    from rl import tasks, tasks_text

    make = tasks_text.make if config.name in tasks_text.TASKS else tasks.make

    def record(index: int) -> Record:
        example = make(config.name, index, config.seed, **config.knobs)
        return Record(example.prompt, example.answer, example.task)

    _try("name or prompts.knobs", config, record)
    return Records(record, lambda i: record(HELD_OUT + i)), 0


def _reasoning_gym(config: PromptsConfig, held_out: int, fits: Fits) -> tuple[Records, int]:
    from rl.rewards import reasoning

    def record(index: int) -> Record:
        identity = reasoning.Identity(config.name, config.seed, index, config.knobs)
        return Record(reasoning.question(identity), identity.dumps(), config.name)

    _try("name or prompts.knobs", config, record)
    return Records(record, lambda i: record(HELD_OUT + i)), 0


def _jsonl(config: PromptsConfig, held_out: int, fits: Fits) -> tuple[Records, int]:
    """The file's records, shuffled anew in every epoch; the last `held_out` that fit never occur in training."""
    if config.path is None or not Path(config.path).is_file():
        raise _error("path", config.path, "a JSONL file (prompts.source is jsonl)")
    numbered = list(_read(Path(config.path)))
    if not numbered:
        raise _error("path", config.path, "a file with prompts: this one is empty")
    fitting = [r for number, r in numbered if fits(r, f"prompts.path: {config.path}, line {number}")]
    dropped = len(numbered) - len(fitting)
    if not fitting:
        raise ConfigError(
            f"prompts.path: {config.path}: all {dropped} prompts are longer than the window of"
            f" prompts.max_prompt_tokens: {config.max_prompt_tokens} tokens"
        )
    if len(fitting) <= held_out:
        raise ConfigError(
            f"eval.prompts: {held_out} given, must be fewer than the {len(fitting)} usable prompts of {config.path}"
        )
    training, kept = fitting[: len(fitting) - held_out], fitting[len(fitting) - held_out :]

    def shuffled(index: int) -> Record:
        epoch, place = divmod(index, len(training))
        if epoch not in orders:
            orders.clear()  # one epoch at a time: a long run does not collect them
            order = list(range(len(training)))
            random.Random(f"{config.seed}/{epoch}").shuffle(order)
            orders[epoch] = order
        return training[orders[epoch][place]]

    def held(index: int) -> Record:
        if index >= len(kept):
            raise ConfigError(f"eval.prompts: {index + 1} asked for, {len(kept)} are held out of {config.path}")
        return kept[index]

    orders: dict[int, list[int]] = {}
    return Records(shuffled, held, len(training)), dropped


def _environment(config: PromptsConfig, held_out: int, fits: Fits) -> tuple[Records, int]:
    """The prompts that episodes begin with; `rollout.episodes` plays the rest."""
    from rl.environments import EnvironmentFailure, opener

    start = opener(config)

    def record(index: int) -> Record:
        return Record(start(index).reset(), task=config.name)

    try:
        record(0)
    except EnvironmentFailure as error:
        raise ConfigError(f"prompts.name or prompts.knobs: {error}") from error
    return Records(record, lambda i: record(HELD_OUT + i)), 0


SOURCES: dict[str, Callable[[PromptsConfig, int, Fits], tuple[Records, int]]] = {
    "task": _task,
    "reasoning_gym": _reasoning_gym,
    "jsonl": _jsonl,
    "environment": _environment,
}


def _read(path: Path) -> Iterator[tuple[int, Record]]:
    """The records of a file with their line numbers; blank lines are skipped."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _record(line, f"prompts.path: {path}, line {number}")


def _record(line: str, where: str) -> Record:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    prompt: Any = fields.get("prompt") if isinstance(fields, dict) else None
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    )
    if not isinstance(prompt, str) and not messages:
        raise ConfigError(f"{where}: `prompt` must be a string or a list of messages with `role` and `content`")
    answer, task = fields.get("answer", ""), fields.get("task", "")
    if not isinstance(task, str):
        raise ConfigError(f"{where}: `task` must be a string, {task!r} given")
    # A verifier may want more than a string: what is none travels as JSON.
    return Record(prompt, answer if isinstance(answer, str) else json.dumps(answer), task)


def _try(key: str, config: PromptsConfig, record: Callable[[int], Record]) -> None:
    """Make one example, so that a wrong name or knob is refused before anything starts."""
    try:
        record(0)
    except ConfigError:
        raise
    except Exception as error:
        # A task says what it wants in exceptions of its own; whatever its type, the user's values caused it.
        raise ConfigError(
            f"prompts.{key}: {config.source} {config.name!r} with {dict(config.knobs)}: {_one_line(error)}"
        ) from error


def _error(key: str, given: object, allowed: str) -> ConfigError:
    return ConfigError(f"prompts.{key}: {given!r} given, must be {allowed}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
