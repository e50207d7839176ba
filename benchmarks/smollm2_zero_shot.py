"""How often SmolLM2-135M-Instruct meets each constraint of `rl.tasks_text` before any training, at T=1.

    python benchmarks/smollm2_zero_shot.py MODEL_FOLDER [--kinds lowercase,begin] [--prompts 256]

A task can only be learned by reinforcement if the model gets it right sometimes: what trains lies between 5 and 60
percent. `configs/smollm2_ppo.yaml` states the numbers this printed.
"""

from __future__ import annotations

import argparse
import os
import random

# Read when vllm is imported: one thread, no telemetry, nothing from a hub, no compilation that takes longer than the
# run.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Sample, score, print one line per kind."""
    from vllm import LLM, SamplingParams

    from rl.tasks_text import CONSTRAINTS, instructions, satisfied

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kinds", default="", help="comma-separated; all by default")
    parser.add_argument("--mixed", action="store_true", help="one rate for the mixture instead of one per kind")
    parser.add_argument("--prompts", type=int, default=128, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--show", type=int, default=0, help="responses to print of each kind")
    options = parser.parse_args()
    kinds = [k for k in options.kinds.split(",") if k] or list(CONSTRAINTS)
    groups = [",".join(kinds)] if options.mixed else kinds

    # Cores without AVX-512 or AMX multiply bf16 twenty times slower than float32.
    llm = LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=64,
        seed=0,
        disable_log_stats=True,
    )
    for group in groups:
        examples = [instructions(random.Random(f"zero shot/{i}"), kinds=group) for i in range(options.prompts)]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=options.max_tokens, seed=i) for i in range(len(examples))
        ]
        outputs = llm.chat([[{"role": "user", "content": e.prompt}] for e in examples], sampling, use_tqdm=False)
        responses = [o.outputs[0] for o in outputs]
        met = [satisfied(r.text, e.answer) for r, e in zip(responses, examples, strict=True)]
        ended = [r.finish_reason == "stop" for r in responses]
        both = [m * e for m, e in zip(met, ended, strict=True)]
        tokens = sum(len(r.token_ids) for r in responses)
        print(
            f"{group}: met {sum(met) / len(met):.3f}, ended {sum(ended) / len(ended):.3f}, met and ended"
            f" {sum(both) / len(both):.3f}, {tokens / len(responses):.1f} tokens",
            flush=True,
        )
        for example, response, good in list(zip(examples, responses, both, strict=True))[: options.show]:
            print(f"  {good:.0f} {example.prompt!r} -> {response.text!r} ({response.finish_reason})")


if __name__ == "__main__":
    main()
