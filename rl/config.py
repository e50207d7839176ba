"""The typed schema of an experiment. Imports neither torch nor vllm nor ray: a bad file is refused in a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """The user's configuration is wrong. One line: which key, what was given, what is allowed."""


@dataclass
class BudgetConfig:
    """What a run may spend. It ends after the step in which one of them is reached; null sets no limit."""

    generated_tokens: int | None = None
    """Tokens that training steps generate; those of evaluations are not counted."""
    trained_tokens: int | None = None
    """Action tokens the policy is trained on, each as often as it is."""
    seconds: float | None = None
    """Seconds in training steps: neither start-up nor evaluations nor checkpoints are counted."""


@dataclass
class RunConfig:
    """Which run this is and how long it goes on."""

    name: str = "ppo"
    seed: int = 0
    out: str = "runs"
    """The run directory is `<out>/<name>-seed<seed>`."""
    steps: int = 30
    """The most steps, and what learning-rate schedules see; a budget may end the run before."""
    resume: bool = False
    """Go on from the newest checkpoint of the run directory; without it an existing run directory is refused."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)


@dataclass
class ClusterConfig:
    """Where the actors live. CPU and GPU differ here and nowhere else."""

    device: str = "cpu"
    """cpu | gpu"""
    address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine."""
    worker_cpus: float = 0.5
    """CPUs that one actor reserves. On two cores the roles take turns, so they take fractions."""
    threads: int = 1
    """Threads of one actor's matrix multiplications."""
    placement_timeout_s: float = 60.0


@dataclass
class StepConfig:
    """The five sizes of a step."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 4
    optimizer_steps: int = 2
    """Optimizer steps per epoch over the step's trajectories."""
    epochs: int = 1
    tokens_per_microbatch: int = 8192


@dataclass
class PromptsConfig:
    """Where prompts come from: a procedural task, a reasoning-gym task, a JSONL file, or an environment."""

    source: str = "task"
    """task | reasoning_gym | jsonl | environment"""
    name: str = "recall"
    """Name of the task (task, reasoning_gym); `module:function` that makes an episode (environment)."""
    path: str | None = None
    """JSONL file with `prompt` (string or chat messages) and optionally `answer`, `task`."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task or the environment, such as `pairs`."""
    seed: int = 0
    """The stream's seed; `run.seed` does not change prompts, only sampling."""
    chat: bool = False
    """Wrap each prompt as a user message in the tokenizer's chat template."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped and counted."""


@dataclass
class RewardConfig:
    function: str = "rl.rewards.exact:score"
    """`module:function`, a function (trajectories) -> scores; rl.environments:episode_return with an environment."""


@dataclass
class OptimizerConfig:
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up, counted from 1."""
    schedule: str = "constant"
    """constant | cosine (to 0 over the run)"""


@dataclass
class DeepSpeedConfig:
    dtype: str = "fp32"
    """fp32 | bf16; of a critic's experts under critic.freeze=encoder also fp16."""
    zero_stage: int = 1
    """0 to 3. bf16 needs at least 1: at 0 DeepSpeed takes another optimizer, which drifts."""
    offload: bool = False
    """Optimizer state in host memory with DeepSpeed's CPU Adam, which compiles once (about 90 s)."""
    ranks: int = 1
    gradient_checkpointing: bool = False


@dataclass
class LoraConfig:
    rank: int = 0
    """0 trains all parameters."""
    alpha: int = 16
    target_modules: list[str] = field(default_factory=list)


@dataclass
class PolicyConfig:
    path: str = "examples/tiny"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ExpertsConfig:
    """The critic's own mixture of experts."""

    blocks: int | None = None
    """Expert blocks on top of the backbone; null: 2 with critic.freeze=encoder, otherwise none."""
    count: int = 8
    top_k: int = 2
    """Experts that a token goes to; none is ever full."""
    intermediate_size: int | None = None
    """Width of an expert; null: twice the backbone's."""
    balance_coefficient: float = 0.01
    """Weight of the load-balance loss, which is 1 where every expert gets the same."""
    upcycle: bool = False
    """With critic.freeze=attention: make the dense MLPs that train into experts, each a copy at the start."""


@dataclass
class IndexShareConfig:
    train_indexer: bool = False
    """The policy's indexers learn beside it, by distillation over the keys that they select; false: they stay as
    pretrained (GLM-5's recipe)."""
    replay: bool = False
    """The policy attends to the positions that the engine selected for its tokens, prompt and response, instead of
    asking its own indexers; costs the engine its prefix cache."""
    overlap_samples: int = 1
    """Without replay: trajectories a step on which `indexshare/overlap` is measured."""
    distill_coefficient: float = 1.0
    """Weight of that loss, a mean over action tokens summed over Full layers. No other loss reaches an indexer."""


@dataclass
class PretrainConfig:
    """`longppo critic pretrain`: how much is recorded, and how often it is learned from."""

    prompts: int = 512
    held_out: int = 128
    """Further prompts, which only measure."""
    epochs: int = 4


@dataclass
class CriticConfig:
    path: str | None = None
    """null: the policy's initial backbone."""
    pretrained: str | None = None
    """A folder that `longppo critic pretrain` wrote; null: the value head starts at 0, experts as the identity."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    freeze: str = "encoder"
    """encoder | attention | none: only experts and head train, on top of a frozen backbone; only MLPs and experts of
    the backbone, and the head; everything."""
    trunk_layers: int | None = None
    """With freeze=encoder: layers of the backbone below the experts; null: a third of them, rounded up. What lies above
    serves the next token, and says less of the return."""
    first_trainable_layer: int = 0
    """With freeze=attention: layers below it are frozen as a whole, their states cached like an encoder's."""
    trunk_dtype: str = "fp32"
    """fp32 | bf16 | fp16, of the layers that are frozen as a whole."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    returns: str = "plain"
    """plain | centred | normalised: values start at 0; at the first step's mean return; are the head's output scaled
    by a running mean and deviation of returns, which is also the unit of the loss."""
    cache_gib: float = 1.0
    """Memory for a step's states of the frozen layers, per rank, so that they are computed once."""
    cache_dir: str | None = None
    """A folder for what exceeds cache_gib; null: that is computed each time."""
    expert_parallel_size: int = 1
    """Ranks over which the experts of a block are spread, with freeze=encoder; 1: every rank holds all."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4))
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    updates_per_policy_update: int = 1
    warmup_steps: int = 0
    """Steps at the start in which only the critic learns."""


@dataclass
class RolloutConfig:
    engines: int = 1
    dtype: str = "float32"
    """float32 | bfloat16"""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    allow_truncated_sampling: bool = False
    max_response_tokens: int = 16
    """Of an environment's episode, its turns and observations together."""
    max_turns: int | None = None
    """Turns of an environment's episode; null: until it is done or its tokens are spent."""
    max_turn_tokens: int | None = None
    """Tokens of one turn; null: what is left of max_response_tokens."""
    max_model_len: int | None = None
    """null: max_prompt_tokens + max_response_tokens."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    kv_cache_gib: int = 1
    """CPU: memory of one engine's KV cache, whole GiB."""
    gpu_memory_utilization: float = 0.4
    """GPU: share of the device's memory for one engine."""
    tensor_parallel_size: int = 1
    probe_tolerance: float = 0.02
    """Largest |d log p| of the probe prompt after a weight sync (nats)."""


@dataclass
class KLConfig:
    where: str = "none"
    """none | reward | loss"""
    estimator: str = "k2"
    """k1 | k2 | k3"""
    coefficient: float = 0.0


@dataclass
class AlgorithmConfig:
    name: str = "ppo"
    """ppo | grpo | sao"""
    gamma: float = 1.0
    lambda_policy: str = "1.0"
    """A number in [0, 1] or `adaptive`."""
    lambda_critic: float = 1.0
    truncation: str = "terminal"
    """terminal | bootstrap"""
    whiten: bool = True
    normalize_std: bool = True
    """GRPO: divide by the group's deviation; false is Dr. GRPO."""
    policy_loss: str = "clip"
    """clip | dis"""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    dis_low: float = 0.8
    """DIS keeps ratios in [1 - dis_low, 1 + dis_high] = [.2, 4]."""
    dis_high: float = 3.0
    importance_cap: float | None = None
    """Truncated importance correction between rollout and trainer: min(exp(trainer - rollout), cap)."""
    aggregation: str = "token_mean"
    """token_mean | sequence_mean | constant"""
    value_clip: float | None = None
    entropy_coefficient: float = 0.0
    target_kl: float | None = None
    """Stops a step's epochs when kl/old passes it."""
    dynamic_sampling_rounds: int = 0
    """GRPO: how often a step draws new prompts in place of groups whose scores do not differ (DAPO). 0: never."""
    overlong_buffer: int = 0
    """Tokens before the response budget over which the score falls by up to `overlong_penalty` (DAPO). 0: never."""
    overlong_penalty: float = 1.0
    kl: KLConfig = field(default_factory=KLConfig)


@dataclass
class EvalConfig:
    prompts: int = 256
    every: int = 10
    """Steps between evaluations; also before the first update and after the last. 0 switches it off."""
    samples: int = 1
    """Sampled responses to each prompt. With n of them eval/pass@k is estimated for k = 2, 4, 8, ... up to n."""
    temperature: float = 1.0
    """Of the sampled responses."""
    greedy: bool = True
    """Also answer each prompt once by the likeliest tokens (eval/greedy)."""


@dataclass
class CheckpointConfig:
    every: int = 10
    """Steps between checkpoints; the last step always saves. 0 saves at the end alone."""
    keep: int = 2


@dataclass
class Config:
    """One experiment."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    step: StepConfig = field(default_factory=StepConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    indexshare: IndexShareConfig = field(default_factory=IndexShareConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def wrong(key: str, given: Any, allowed: str) -> ConfigError:
    """The one line of every refusal."""
    return ConfigError(f"{key}: {given!r} given, must be {allowed}")
