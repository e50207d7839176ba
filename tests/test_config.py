"""A configuration is what was meant, or one line: which key, what was given, what is allowed."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.config import Config, ConfigError, get
from rl.config_load import build, dotted_keys, load, to_yaml
from rl.config_rules import BOUNDS, CHOICES, check
from rl.plan import trained

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What passes for a model before anything is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def experiment(tmp_path: Path, model: Path) -> Path:
    """A file that is right."""
    path = tmp_path / "experiment.yaml"
    path.write_text(f"policy: {{path: {model}}}\n")
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The one line that `load` answers with."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "given_value", "allowed"),
    [
        # unknown: the nearest name, of the same section or of another
        ("polcy.path=x", "polcy", "", "did you mean policy?"),
        ("policy.optimzer.lr=1", "policy.optimzer", "", "did you mean policy.optimizer?"),
        ("step.prompt_per_step=4", "step.prompt_per_step", "", "did you mean step.prompts_per_step?"),
        ("step.gamma=1", "step.gamma", "", "did you mean algorithm.gamma?"),
        ("run..name=x", "run.", "", "name, seed, out, steps, resume"),
        ("run.qqqqqq=1", "run.qqqqqq", "", "name, seed, out, steps, resume"),
        ("extends=ppo.yaml", "extends", "", "run, cluster, step"),
        # wrong type
        ("run.steps=ten", "run.steps", "'ten'", "a whole number"),
        ("run.steps=1.5", "run.steps", "1.5", "a whole number"),
        ("run.steps=true", "run.steps", "True", "a whole number"),
        ("run.steps=", "run.steps", "None", "a whole number"),
        ("run.seed=[1]", "run.seed", "[1]", "a whole number"),
        ("run.resume=maybe", "run.resume", "'maybe'", "true or false"),
        ("run.name=on", "run.name", "True", "a string"),
        ("run.name.x=1", "run.name", "{'x': 1}", "a string"),
        ("run=3", "run", "3", "a section with name, seed"),
        ("policy.optimizer.betas=0.9", "policy.optimizer.betas", "0.9", "a list"),
        ("policy.optimizer.betas=[0.9, x]", "policy.optimizer.betas[1]", "'x'", "a finite number"),
        ("prompts.knobs=3", "prompts.knobs", "3", "a mapping"),
        # not a number, not finite, null where nothing may be null
        ("policy.optimizer.lr=nan", "policy.optimizer.lr", "nan", "a finite number"),
        ("policy.optimizer.lr=.nan", "policy.optimizer.lr", "nan", "a finite number"),
        ("policy.optimizer.lr=-inf", "policy.optimizer.lr", "-inf", "a finite number"),
        ("run.steps=1e400", "run.steps", "inf", "a whole number"),
        ("prompts.knobs.pairs=.nan", "prompts.knobs.pairs", "nan", "a finite number"),
        ("algorithm.lambda_policy=nan", "algorithm.lambda_policy", "'nan'", "a number in [0, 1] or adaptive"),
        ("algorithm.gamma=None", "algorithm.gamma", "'None'", "a finite number"),
        ("policy.path=None", "policy.path", "'None'", "a string"),
        ("run.name=???", "run.name", "'???'", "a string"),
        # impossible sizes
        ("run.steps=0", "run.steps", "0", "between 1 and"),
        ("step.prompts_per_step=-1", "step.prompts_per_step", "-1", "between 1 and"),
        ("prompts.max_prompt_tokens=0", "prompts.max_prompt_tokens", "0", "between 1 and"),
        ("algorithm.gamma=1.01", "algorithm.gamma", "1.01", "between 0 and 1"),
        ("algorithm.lambda_policy=2", "algorithm.lambda_policy", "'2'", "a number in [0, 1] or adaptive"),
        ("policy.deepspeed.zero_stage=4", "policy.deepspeed.zero_stage", "4", "between 0 and 3"),
        ("policy.optimizer.betas=[0.9, 1]", "policy.optimizer.betas", "[0.9, 1.0]", "two numbers in [0, 1)"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas", "[0.9]", "two numbers in [0, 1)"),
        ("rollout.max_model_len=16", "rollout.max_model_len", "16", "more than max_response_tokens = 16"),
        ("rollout.max_num_batched_tokens=8", "rollout.max_num_batched_tokens", "8", "at least max_num_seqs = 64"),
        ("rollout.temperature=0", "rollout.temperature", "0.0", "above 0"),
        # a batch that does not divide, or is too small for the ranks
        ("step.optimizer_steps=3", "step.optimizer_steps", "3", "a divisor of prompts_per_step x samples_per_prompt"),
        ("critic.deepspeed.ranks=65", "critic.deepspeed.ranks", "65", "at most 64"),
        # one of a few words
        ("cluster.device=tpu", "cluster.device", "'tpu'", "one of cpu, gpu"),
        ("algorithm.name=pppo", "algorithm.name", "'pppo'", "one of ppo, grpo, sao"),
        # files that are not there
        ("policy.path=nowhere", "policy.path", "'nowhere'", "a folder with a config.json"),
        ("policy.path=models/smollm2-no", "policy.path", "'models/smollm2-no'", "longppo fetch-smollm2 makes it"),
        ("critic.path=nowhere", "critic.path", "'nowhere'", "a folder with a config.json"),
        ("prompts.source=jsonl", "prompts.path", "None", "a JSONL file"),
        ("reward.function=exact", "reward.function", "'exact'", "module:function"),
        ("reward.function=':score'", "reward.function", "':score'", "module:function"),
        # not an override at all
        ("run.steps", "override", "'run.steps'", "key=value"),
        ("=3", "override", "'=3'", "key=value"),
        ("run={", "override", "run={", "while parsing"),
        ("policy.optimizer.lr=${nothing}", "override", "${nothing}", "not found"),
    ],
)
def test_a_bad_value_names_key_value_and_what_is_allowed(
    experiment: Path, override: str, key: str, given_value: str, allowed: str
) -> None:
    line = refusal(experiment, override)
    assert line.startswith(key)
    assert given_value in line
    assert allowed in line


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["policy.deepspeed.dtype=bf16", "policy.deepspeed.zero_stage=0"], "policy.deepspeed.zero_stage", "at least 1"),
        (
            ["critic.freeze=none", "critic.deepspeed.dtype=bf16", "critic.deepspeed.zero_stage=0"],
            "critic.deepspeed.zero_stage",
            "at least 1",
        ),
        (["algorithm.name=grpo", "step.samples_per_prompt=1"], "step.samples_per_prompt", "at least 2 for grpo"),
        (["algorithm.dynamic_sampling_rounds=2"], "algorithm.dynamic_sampling_rounds", "0 for ppo"),
        (["algorithm.overlong_buffer=17"], "algorithm.overlong_buffer", "at most rollout.max_response_tokens = 16"),
        (["algorithm.policy_loss=dis", "algorithm.importance_cap=2"], "algorithm.importance_cap", "null with dis"),
        (["rollout.top_p=0.9"], "rollout.top_p", "rollout.allow_truncated_sampling=true"),
        (
            ["rollout.top_k=5", "rollout.allow_truncated_sampling=true", "algorithm.policy_loss=dis"],
            "algorithm.policy_loss",
            "clip",
        ),
        (["algorithm.kl.where=loss"], "algorithm.kl.coefficient", "above 0"),
        (
            ["algorithm.kl.where=loss", "algorithm.kl.coefficient=1", "algorithm.kl.estimator=k1"],
            "algorithm.kl.estimator",
            "k2 or k3 in the loss",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    experiment: Path, overrides: list[str], key: str, allowed: str
) -> None:
    line = refusal(experiment, *overrides)
    assert line.startswith(key)
    assert allowed in line


def test_grpo_has_no_critic_whose_values_could_be_wrong(experiment: Path) -> None:
    load(experiment, ["algorithm.name=grpo", "critic.deepspeed.ranks=65"])


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("policy.optimizer.lr='1e-6'", "policy.optimizer.lr", 1e-6),
        ("policy.optimizer.lr=1e-6", "policy.optimizer.lr", 1e-6),
        ("run.steps='1e2'", "run.steps", 100),
        ("run.steps=7.0", "run.steps", 7),
        ("cluster.address=None", "cluster.address", None),
        ("cluster.address=null", "cluster.address", None),
        ("cluster.address=~", "cluster.address", None),
        ("rollout.max_model_len='None'", "rollout.max_model_len", None),
        ("algorithm.dual_clip='3'", "algorithm.dual_clip", 3.0),
        ("algorithm.kl.where=None", "algorithm.kl.where", "none"),
        ("algorithm.kl.where=null", "algorithm.kl.where", "none"),
        ("algorithm.lambda_policy=0.95", "algorithm.lambda_policy", "0.95"),
        ("run.resume='yes'", "run.resume", True),
        ("run.resume=False", "run.resume", False),
        ("prompts.knobs.pairs='56'", "prompts.knobs", {"pairs": 56}),
        ("prompts.knobs.rate='1e-6'", "prompts.knobs", {"rate": 1e-6}),
        ("prompts.knobs.limit=None", "prompts.knobs", {"limit": None}),
        ("prompts.knobs.a=[1, None, {b: 'null'}]", "prompts.knobs", {"a": [1, None, {"b": None}]}),
        ("run.name=a=b", "run.name", "a=b"),
    ],
)
def test_words_for_numbers_and_nulls_are_read_as_meant(experiment: Path, override: str, key: str, meant: Any) -> None:
    found = get(load(experiment, [override]), key)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("text", "starts", "contains"),
    [
        ("run: [", "config file:", "experiment.yaml is not a readable YAML mapping: while parsing"),
        ("[1, 2]", "config file:", "must be a mapping of sections"),
        ("3", "config file:", "not a readable YAML mapping"),
        ("\x00", "config file:", "not a readable YAML mapping"),
        ("run: {name: a, name: b}", "config file:", "duplicate key name"),
        ("run: !!python/object:os.system {}", "config file:", "not a readable YAML mapping"),
        ("run:", "run: None given", "must be a section with name, seed"),
        ("step.epochs: 2", "step.epochs:", "must be nested"),
        ("1: 2", "1: unknown key", "run, cluster"),
        ("extends: experiment.yaml", "extends: experiment.yaml -> experiment.yaml is a circle", ""),
        ("extends: nowhere.yaml", "config file:", "nowhere.yaml given (extended by experiment.yaml), there is no such"),
        ("extends: [a, b]", "extends: ['a', 'b'] given", "must be a file name"),
        ("extends: 3", "extends: 3 given", "must be a file name"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused(tmp_path: Path, text: str, starts: str, contains: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    line = refusal(path)
    assert line.startswith(starts)
    assert contains in line


@pytest.mark.parametrize("what", ["missing", "folder", "bytes"])
def test_a_path_that_is_not_a_text_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path).startswith(f"config file: {path}")


def test_a_long_circle_of_files_is_named_from_end_to_end(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {parent}.yaml")
    assert refusal(tmp_path / "a.yaml").startswith("extends: a.yaml -> b.yaml -> c.yaml -> a.yaml is a circle")


def test_a_child_holds_only_what_differs_and_overrides_come_last(tmp_path: Path, model: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "parent.yaml").write_text(
        f"policy: {{path: {model}, optimizer: {{lr: 1e-3, weight_decay: 0.1}}}}\nrun: {{name: parent, steps: 5}}"
    )
    (tmp_path / "more/child.yaml").write_text(
        "extends: ../parent.yaml\nrun: {name: child}\npolicy: {optimizer: {lr: 1e-4}}"
    )
    config = load(tmp_path / "more/child.yaml", ["run.steps=9"])
    assert (config.run.name, config.run.steps) == ("child", 9)
    assert (config.policy.optimizer.lr, config.policy.optimizer.weight_decay) == (1e-4, 0.1)
    assert config.policy.path == str(model)


EXPERIMENTS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if not p.stem.startswith("indexshare_")]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_the_experiments_of_this_repository_load(path: Path, model: Path) -> None:
    load(path, [f"policy.path={model}"])


def test_paths_are_looked_up_here_then_in_the_repository_and_made_absolute(
    monkeypatch: Any, tmp_path: Path, experiment: Path
) -> None:
    here, repository = tmp_path / "here", tmp_path / "repository"
    for folder in (here / "both", repository / "both", repository / "one"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr("rl.config_load.ROOT", repository)
    monkeypatch.chdir(here)
    assert load(experiment, ["policy.path=both"]).policy.path == str(here / "both")
    assert load(experiment, ["policy.path=one"]).policy.path == str(repository / "one")
    assert "policy.path: 'neither' given" in refusal(experiment, "policy.path=neither")
    assert refusal(experiment, f"policy.path={'x' * 300}").startswith("policy.path: 'xxx")


@pytest.mark.parametrize("name", ["a/b", "../a", "..", "/a", "a/"])
def test_a_run_is_named_by_a_plain_name(experiment: Path, name: str) -> None:
    assert refusal(experiment, f"run.name={name}").startswith(f"run.name: '{name}' given, must be a plain name")


def test_an_empty_prompt_file_is_refused(tmp_path: Path, experiment: Path) -> None:
    empty = tmp_path / "prompts.jsonl"
    empty.touch()
    assert "this one is empty" in refusal(experiment, "prompts.source=jsonl", f"prompts.path={empty}")


def leaf_types() -> dict[str, Any]:
    """The type of every leaf of the schema."""

    def walk(kind: type, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(kind).items():
            inner = dataclasses.is_dataclass(hint)
            found |= walk(typing.cast(type, hint), f"{prefix}{name}.") if inner else {f"{prefix}{name}": hint}
        return found

    return walk(Config, "")


def is_numeric(hint: Any) -> bool:
    """int, float, and either of them or null."""
    return bool({int, float} & {hint, *typing.get_args(hint)}) and typing.get_origin(hint) is not list


def test_rules_speak_of_keys_that_exist() -> None:
    assert set(CHOICES) | set(BOUNDS) <= set(dotted_keys(Config))


def test_every_number_has_bounds_that_its_default_keeps() -> None:
    assert {key for key, hint in leaf_types().items() if is_numeric(hint)} == set(BOUNDS)
    default = Config()
    for key, (low, high) in BOUNDS.items():
        assert get(default, key) is None or low <= get(default, key) <= high
    for key, allowed in CHOICES.items():
        assert get(default, key) in allowed


def number(key: str, hint: Any) -> st.SearchStrategy[Any]:
    """Anything that the bounds allow."""
    low, high = BOUNDS[key]
    whole = int in {hint, *typing.get_args(hint)}
    found: st.SearchStrategy[Any] = st.integers(int(low), int(high)) if whole else st.floats(low, high)
    return found | st.none() if type(None) in typing.get_args(hint) else found


TEXTS = st.sampled_from(
    ["a", "true", "1.0", "1e-6", "~x", "a: b", "- a", "#", "ünï", "null x", "'", '"', "a\nb", "=", "@"]
)
WORDS = st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.booleans(), st.none(), st.just("word"), st.just("a: b"))


def leaf(key: str, hint: Any) -> st.SearchStrategy[Any]:
    """A value of that leaf."""
    if key in CHOICES:
        return st.sampled_from(CHOICES[key])
    if is_numeric(hint):
        return number(key, hint)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.sampled_from(["pairs", "x"]), WORDS | st.lists(WORDS, max_size=2), max_size=2)
    if typing.get_origin(hint) is list:
        inner = st.floats(0, 0.99) if float in typing.get_args(hint) else TEXTS
        return st.lists(inner, min_size=2, max_size=2)
    if hint is bool:
        return st.booleans()
    return TEXTS | st.none() if type(None) in typing.get_args(hint) else TEXTS


def tree_of(values: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({}, optional={key: leaf(key, hint) for key, hint in leaf_types().items()}))
def test_what_is_written_is_what_is_read(monkeypatch: Any, tmp_path: Path, values: dict[str, Any]) -> None:
    # The rules are about sense; here every value of the right type must survive the file.
    monkeypatch.setattr("rl.config_load.check", lambda config: None)
    monkeypatch.setattr("rl.config_load.located", lambda path: path)
    config = build(tree_of(values))
    for key, value in values.items():
        if not isinstance(value, str) or value in CHOICES.get(key, ()):
            assert get(config, key) == value
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


def test_bounds_are_enforced_at_both_ends(model: Path) -> None:
    for key, (low, high) in BOUNDS.items():
        for outside in (low - 1, high * 2 + 1):
            config = build(tree_of({"policy.path": str(model)}))
            *sections, name = key.split(".")
            setattr(get(config, ".".join(sections)), name, outside)
            with pytest.raises(ConfigError, match=f"^{key}: .* must be between "):
                check(config)


def test_what_trains_is_said_by_part():
    whole = {"parameters": 1_551_104, "trained": 1_500_000}
    assert trained("policy", whole) == "policy: 1,500,000 of 1,551,104 parameters train"
    parts = {"parameters": 1500, "trained": 500, "frozen/trunk": 1000, "trained/experts": 400, "trained/head": 100}
    assert trained("critic", parts) == (
        "critic: 500 of 1,500 parameters train (frozen trunk 1,000, trained experts 400, trained head 100)"
    )
