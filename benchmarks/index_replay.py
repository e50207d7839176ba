"""What index replay is worth: |d log p| of rollout against trainer, each selecting for itself and replayed.

    python -m benchmarks.index_replay            # the tiny policy on recall prompts, float32 and bfloat16

Both sides compute in the same precision. The replayed trainer attends to what the engine selected; everything else is
the same, the sampled tokens too.
"""

from __future__ import annotations

import argparse

import numpy as np
import ray
import torch

from benchmarks.experiments import ROOT
from policy.model import build
from rl.cluster import worker_environment
from rl.config import Config, DeepSpeedConfig, PolicyConfig, PromptsConfig
from rl.learner import per_response
from rl.prompts import PromptSource
from rl.trajectory import Trajectory, pack
from rollout.pool import RolloutPool

POLICY_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}


def rollouts(dtype: str, path: str, prompts: int) -> list[Trajectory]:
    """Recorded responses of one engine in that precision."""
    config = Config()
    config.policy.path, config.rollout.dtype, config.indexshare.replay = path, dtype, True
    config.prompts = PromptsConfig(max_prompt_tokens=448)
    config.rollout.max_response_tokens, config.rollout.max_num_batched_tokens = 8, 8192
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": worker_environment(config)}}
    pool = RolloutPool.start(config, [options])
    pool.wait_ready()
    asked = PromptSource.open(config).next(prompts)
    found = pool.generate(asked, 1, step=0, record=prompts)
    for engine in pool.engines:
        ray.kill(engine)
    return found


@torch.no_grad()
def distances(dtype: str, path: str, trajectories: list[Trajectory], replay: bool) -> np.ndarray:
    """|d log p| of every response token."""
    model = build(PolicyConfig(path=path, deepspeed=DeepSpeedConfig(dtype=POLICY_DTYPE[dtype])), 1.0).eval()
    model.replay = replay
    parts = []
    for t in trajectories:
        batch = pack([t])
        parts.append(np.abs(per_response(batch, model(batch)[0])[0] - t.rollout_logprobs))
    return np.concatenate(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=str(ROOT / "examples" / "tiny"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", choices=list(POLICY_DTYPE), default=list(POLICY_DTYPE))
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    print("| precision | selection | tokens | mean | 99th percentile | largest |\n|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        trajectories = rollouts(dtype, args.path, args.prompts)
        for replay in (False, True):
            d = distances(dtype, args.path, trajectories, replay)
            cells = (f"{x:.2g}" for x in (d.mean(), np.quantile(d, 0.99), d.max()))
            print(f"| {dtype} | {'replayed' if replay else 'own'} | {len(d)} | {' | '.join(cells)} |", flush=True)
        sizes = [len(t.selected.data) for t in trajectories if t.selected is not None]
        tokens = sum(t.tokens for t in trajectories)
        print(f"recorded: {sum(sizes) / tokens:.0f} bytes a token", flush=True)


if __name__ == "__main__":
    main()
