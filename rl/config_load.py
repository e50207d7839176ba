"""From a YAML file and dotted overrides to a checked `Config`. Imports neither torch nor vllm nor ray."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config import Config, ConfigError
from rl.config_rules import CHOICES, check

ROOT = Path(__file__).parents[1]
"""The repository, where `configs/` and `examples/` lie."""
NULL_WORDS = ("none", "null", "~", "")
TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The experiment in `path` (and in the files that it `extends`) with `key=value` overrides.

    Relative paths of models and prompts are looked up in the current directory, then in the repository, and made
    absolute, since actors may run elsewhere; `extends` is relative to the file that says it.
    Raises ConfigError: one line that names the key, what was given and what is allowed.
    """
    return resolve(read(Path(path)), overrides)


def resolve(tree: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """The same from the nested mappings that a file holds."""
    config = build(merged(tree, parsed(overrides)))
    for section in (config.policy, config.critic, config.prompts):
        if section.path is not None:
            section.path = located(section.path)
    if config.critic.pretrained is not None:
        config.critic.pretrained = located(config.critic.pretrained)
    check(config)
    return config


def build(tree: Mapping[str, Any]) -> Config:
    """A `Config` from nested mappings, every key known and every value of its type; not yet checked for sense."""
    return typing.cast(Config, typed(Config, tree))


def to_yaml(config: Config) -> str:
    """The resolved experiment; `load` of it gives the same `Config`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def located(path: str) -> str:
    """The absolute path of what is there; as given, for the message, where nothing is."""
    return next((str(p.absolute()) for p in (Path(path), ROOT / path) if os.path.exists(p)), path)


def read(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file on top of those that it extends; `children` are the files that extend this one."""
    resolved = path.resolve()
    if resolved in children:
        chain = " -> ".join(p.name for p in (*children, resolved))
        raise ConfigError(f"extends: {chain} is a circle, a file must not extend itself")
    if not path.is_file():
        where = f" (extended by {children[-1].name})" if children else ""
        raise ConfigError(f"config file: {path} given{where}, there is no such file")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file: {path} is not a readable YAML mapping: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file: {path} holds a {type(loaded).__name__}, must be a mapping of sections")
    tree = {str(k): v for k, v in loaded.items()}
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise ConfigError(f"extends: {parent!r} given in {path}, must be a file name")
    return merged(read(path.parent / parent, (*children, resolved)), tree)


def parsed(overrides: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as a tree."""
    for text in overrides:
        if "=" not in text or text.startswith(("=", "-")):
            raise ConfigError(f"override: {text!r} given, must be key=value, such as policy.optimizer.lr=1e-6")
    try:
        return typing.cast(
            dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=True)
        )
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override: {' '.join(overrides)}: {_one_line(error)}") from error


def merged(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """The parent's tree with what the child says."""
    out = dict(parent)
    for key, value in child.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def typed(kind: type, tree: Any, prefix: str = "") -> Any:
    """A tree as a dataclass, every key and value checked; `prefix` is where it stands in the configuration."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix or 'config'}: {tree!r} given, must be a section with {_names(kind)}")
    hints = typing.get_type_hints(kind)
    for key in tree:
        if key not in hints:
            raise ConfigError(_unknown(kind, f"{prefix}.{key}" if prefix else str(key), str(key)))
    return kind(**{key: _value(hints[key], value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()})


def _unknown(kind: type, where: str, key: str) -> str:
    """The nearest known name: of this section first, then of any."""
    if "." in key and where in dotted_keys(Config):
        return f"{where}: given as one key in YAML, must be nested (dotted keys are for the command line)"
    near = difflib.get_close_matches(key, [f.name for f in fields(kind)], 1)
    prefix = where.rpartition(".")[0]
    if near:
        suggestion = f"{prefix}.{near[0]}" if prefix else near[0]
    else:
        known = {dotted.rpartition(".")[2]: dotted for dotted in dotted_keys(Config)}
        close = difflib.get_close_matches(key, known, 1)
        suggestion = known[close[0]] if close else ""
    hint = f"did you mean {suggestion}?" if suggestion else f"allowed here: {_names(kind)}"
    return f"{where}: unknown key, {hint}"


def dotted_keys(kind: type, prefix: str = "") -> list[str]:
    """Every leaf of the schema, such as `policy.optimizer.lr`."""
    out: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        dotted = f"{prefix}{name}"
        out += dotted_keys(typing.cast(type, hint), f"{dotted}.") if is_dataclass(hint) else [dotted]
    return out


def _names(kind: type) -> str:
    return ", ".join(f.name for f in fields(kind))


def _value(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`; a number written as a string and a null written as a word are read as meant."""
    if is_dataclass(hint):
        return typed(typing.cast(type, hint), value, key)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.strip().lower() in NULL_WORDS):
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{key}: {value!r} given, must be a list")
        return [_value(typing.get_args(hint)[0], v, f"{key}[{i}]") for i, v in enumerate(value)]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}: {value!r} given, must be a mapping")
        return {str(k): _untyped(v, f"{key}.{k}") for k, v in value.items()}
    return SCALARS[hint](value, key)


def _untyped(value: Any, key: str) -> Any:
    """A task's argument, whose type the task knows: numbers and nulls written as words are read as meant."""
    if isinstance(value, Mapping):
        return {str(k): _untyped(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_untyped(v, f"{key}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, str) and value.strip().lower() in NULL_WORDS:
        return None
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: {value!r} given, must be a finite number")
    return value


def _number(value: Any, key: str, allowed: str) -> float:
    try:
        number = float(value) if not isinstance(value, bool) and value is not None else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{key}: {value!r} given, must be {allowed}")
    return number


def _float(value: Any, key: str) -> float:
    return _number(value, key, "a finite number")


def _int(value: Any, key: str) -> int:
    number = _number(value, key, "a whole number")
    if number != int(number):
        raise ConfigError(f"{key}: {value!r} given, must be a whole number")
    return int(number)


def _bool(value: Any, key: str) -> bool:
    word = str(value).strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ConfigError(f"{key}: {value!r} given, must be true or false")
    return word in TRUE_WORDS


def _str(value: Any, key: str) -> str:
    is_null = value is None or (isinstance(value, str) and value.strip().lower() in NULL_WORDS)
    if is_null and "none" in CHOICES.get(key, ()):
        return "none"
    if isinstance(value, str) and not is_null and value != "???":  # OmegaConf's word for a missing value
        return value
    # `lambda_policy: 0.95` is meant as written; other types are a slip.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{key}: {value!r} given, must be a string")


SCALARS: dict[Any, Any] = {float: _float, int: _int, bool: _bool, str: _str}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).partition("\n    full_key:")[0].split())
