"""TRL's side of the PPO job: `python trl_ppo.py FOLDER OUT STEPS EPOCHS OPTIMIZER_STEPS SEED`.

As fast as its options allow: no gradient checkpointing (its default), no samples for show, nothing saved or reported,
and a reward model that is no model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from beside import job
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


class ShareOfToken(torch.nn.Module):
    """The reward in the form of a reward model: a "hidden state" [batch, tokens, 1] that is the reward so far."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Identity()

    @staticmethod
    def backbone(input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Stands for the backbone's forward pass."""
        wanted = (input_ids == job.WANTED).float()
        wanted[:, : job.PROMPT] = 0
        return SimpleNamespace(hidden_states=[(wanted.cumsum(1) / job.RESPONSE).unsqueeze(-1)])


class Log(TrainerCallback):
    """A line a step."""

    def __init__(self, out: Path) -> None:
        self._log = job.StepLog(out / "metrics.jsonl")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Called at the end of every step."""
        if "objective/scores" in logs:
            self._log.write(state.global_step, logs["objective/scores"])


def main(folder: Path, out: Path, steps: int, epochs: int, optimizer_steps: int, seed: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    path = str(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    args = PPOConfig(
        output_dir=str(out),
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.SEQUENCES,
        gradient_accumulation_steps=1,
        num_mini_batches=optimizer_steps,
        num_ppo_epochs=epochs,
        total_episodes=steps * job.SEQUENCES,
        local_rollout_forward_batch_size=job.SEQUENCES,
        response_length=job.RESPONSE,
        temperature=1.0,
        num_sample_generations=0,
        learning_rate=job.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=job.BETAS[0],
        adam_beta2=job.BETAS[1],
        weight_decay=0.0,
        kl_coef=0.0,
        cliprange=job.CLIP,
        cliprange_value=job.CLIP,
        lam=job.LAMBDA,
        vf_coef=1.0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    value = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(value.score.weight)  # where LongPPO's critic starts: values of noise would drown the reward
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=ShareOfToken(),
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer(p)["input_ids"] for p in job.prompts()]}),
        callbacks=[Log(out)],
    )
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
