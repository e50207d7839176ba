"""TRL's side of the GRPO job: `python trl_grpo.py FOLDER OUT STEPS EPOCHS OPTIMIZER_STEPS SEED`.

As fast as its options allow: no reference model (beta 0), no gradient checkpointing, nothing saved or reported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from beside import job
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def share_of_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward as TRL calls it."""
    return [job.share(ids) for ids in completion_ids]


class Log(TrainerCallback):
    """A line a step."""

    def __init__(self, out: Path) -> None:
        self._log = job.StepLog(out / "metrics.jsonl")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Called at the end of every step."""
        if "reward" in logs:
            self._log.write(state.global_step, logs["reward"])


def main(folder: Path, out: Path, steps: int, epochs: int, optimizer_steps: int, seed: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    path = str(folder / "model")
    args = GRPOConfig(
        output_dir=str(out),
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.SEQUENCES // optimizer_steps,
        gradient_accumulation_steps=1,
        steps_per_generation=optimizer_steps,
        num_iterations=epochs,
        max_steps=steps * epochs * optimizer_steps,
        num_generations=job.GROUP,
        max_completion_length=job.RESPONSE,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=job.CLIP,
        learning_rate=job.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=job.BETAS[0],
        adam_beta2=job.BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to="none",
        save_strategy="no",
        logging_steps=epochs * optimizer_steps,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=args,
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=share_of_token,
        train_dataset=Dataset.from_dict({"prompt": job.prompts()}),
        callbacks=[Log(out)],
    )
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
