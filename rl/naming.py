"""Functions of the user, named in YAML as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rl.config import ConfigError


def function(key: str, name: str) -> Callable[..., Any]:
    """The function that the configuration's `key` names. Raises ConfigError, also where its module cannot run."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{key}: {name!r} given, must be `module:function`")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}: {name!r} given, must name a function: {cause}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {name!r} given, must name a function: it is a {type(found).__name__}")
    return found
