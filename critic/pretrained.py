"""A critic as a folder: what `longppo critic pretrain` writes and `critic.pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from critic.model import ValueModel
from rl.config import ConfigError, CriticConfig
from rl.model_rules import CRITIC_SETTINGS, CRITIC_WEIGHTS


def write(directory: str, config: CriticConfig, model: ValueModel, state: Mapping[str, torch.Tensor]) -> None:
    """What trains, whole (`state`), the settings that it depends on, and a fingerprint of the trunk below it."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / CRITIC_WEIGHTS)
    about = {key: getattr(config, key) for key in ("freeze", "trunk_layers", "first_trainable_layer")}
    about |= {"experts": asdict(config.experts), "trunk": trunk_fingerprint(model)}
    (folder / CRITIC_SETTINGS).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def read(directory: str, model: ValueModel) -> None:
    """Load the weights into a fresh model. Raises ConfigError where they are another model's."""
    folder = Path(directory)
    about = json.loads((folder / CRITIC_SETTINGS).read_text(encoding="utf-8"))
    if abs(about["trunk"] - trunk_fingerprint(model)) > 1e-3 * max(abs(about["trunk"]), 1.0):
        raise ConfigError(f"critic.pretrained: {folder} given, must be of this backbone, its frozen layers differ")
    state, wanted = load_file(folder / CRITIC_WEIGHTS), model.state_dict()
    wrong = sorted(state.keys() ^ wanted.keys()) or sorted(k for k in wanted if state[k].shape != wanted[k].shape)
    if wrong:
        raise ConfigError(f"critic.pretrained: {folder} given, must be a critic of this backbone, {wrong[0]} differs")
    model.load_state_dict(state)


def trunk_fingerprint(model: ValueModel) -> float:
    """Sum of the absolute weights of the frozen layers below what trains; 0 where there are none."""
    if model.trunk is None:
        return 0.0
    return float(sum(p.detach().abs().sum(dtype=torch.float64) for p in model.trunk.backbone.parameters()))
