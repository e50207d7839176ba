"""The job that both sides do: one small random Llama, prompts of 16 tokens, 64 new tokens each, a reward by program.

Imports nothing heavy, since three environments read it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS = 256, 256, 688, 4, 4
PROMPT, RESPONSE, SEQUENCES = 16, 64, 32
"""Tokens of a prompt, of a response; responses in a step."""
GROUP = 8
"""GRPO: samples of one prompt; 32 responses are then 4 prompts."""
WANTED = 7
"""The reward is the share of this token in a response."""
LEARNING_RATE, BETAS, CLIP, LAMBDA = 1e-3, (0.9, 0.999), 0.2, 1.0
PROMPTS = 1024

# A character for every token that the model writes. The two special tokens stand beyond its vocabulary: it can write
# neither, so every response has 64 tokens on both sides.
CHARACTERS = "".join(chr(0x100 + i) for i in range(VOCABULARY))
EOS, PAD = "</s>", "<pad>"


def share(ids: Sequence[int]) -> float:
    """The reward of one response."""
    return sum(int(i) == WANTED for i in ids) / len(ids)


def score(trajectories: Sequence[Any]) -> list[float]:
    """The reward as LongPPO names it."""
    return [share(t.response_ids) for t in trajectories]


def prompts() -> list[str]:
    """Random prompts, one token a character."""
    draw = random.Random(0)
    return ["".join(draw.choices(CHARACTERS, k=PROMPT)) for _ in range(PROMPTS)]


def write(folder: Path) -> None:
    """The model with its tokenizer in `folder`/model, the prompts in `folder`/prompts.jsonl."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=CHARACTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=PROMPT + RESPONSE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


class StepLog:
    """What a TRL run tells of its steps, in the form of LongPPO's metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def write(self, step: int, reward: float) -> None:
        """One line, at once on disk: its appearance marks the end of the step."""
        self._file.write(json.dumps({"step": step, "reward/mean": reward}) + "\n")
        self._file.flush()
