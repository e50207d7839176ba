"""The trunk is paid for once per step, wherever its states are kept, and never mixed up."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from critic.trunk_cache import StateCache
from rl.trajectory import pack
from tests.test_critic import ATTENTION, ENCODER, LONG, PACK, folder, gradients, llama, model_of  # noqa: F401

ROW = 32 * 4
"""Bytes of one state of the small model."""


def entry(i: int, rows: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(i)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_comes_back_from_memory_and_file(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = StateCache(5 * ROW, str(tmp_path))
    entries = {b"%d" % i: entry(i, 1 + i, dtype) for i in range(6)}
    for _ in range(2):
        for key, states in entries.items():
            assert cache.get(key) is None
            cache.put(key, states)
        assert cache.bytes_in_memory <= 5 * ROW
        assert cache.bytes_in_memory + cache.bytes_in_file == sum(21 * [32 * dtype.itemsize])
        assert cache.bytes_in_file > 0
        for key, states in entries.items():
            assert torch.equal(cache.get(key), states)
        assert cache.refused == 0
        cache.clear()
        assert cache.bytes_in_memory == cache.bytes_in_file == 0
    assert list(tmp_path.iterdir()) == []  # the file has no name that could be left behind


def test_a_kept_state_is_a_copy_and_no_view_of_a_larger_one() -> None:
    cache = StateCache(10 * ROW)
    whole = entry(0, 100)
    cache.put(b"x", whole[:2])
    expected = whole[:2].clone()
    whole.zero_()
    assert torch.equal(cache.get(b"x"), expected)
    assert cache.get(b"x").untyped_storage().nbytes() == 2 * ROW


def test_past_the_budget_without_a_folder_nothing_is_kept() -> None:
    cache = StateCache(3 * ROW)
    cache.put(b"a", entry(0))
    cache.put(b"b", entry(1))
    assert cache.get(b"b") is None
    assert cache.refused == 1


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_folder_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: int
) -> None:
    real, written = os.pwrite, 0

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal written
        if written > 2 * ROW:
            raise OSError(failure, os.strerror(failure))
        written += real(file, data, offset)
        return written and len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    cache = StateCache(0, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            cache.put(b"%d" % i, entry(i))
    assert [cache.get(b"%d" % i) is not None for i in range(5)] == [True, True, False, False, False]
    assert torch.equal(cache.get(b"1"), entry(1))
    assert cache.refused == 3
    (line,) = caplog.messages
    assert line.startswith(f"critic.cache_dir: {tmp_path} is full or cannot be written")


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:50], offset))
    cache = StateCache(0, str(tmp_path))
    cache.put(b"x", entry(3))
    assert torch.equal(cache.get(b"x"), entry(3))


@pytest.mark.parametrize("mode", [ENCODER, ATTENTION], ids=["encoder", "attention"])
@pytest.mark.parametrize("where", ["memory", "file", "both", "nowhere"])
def test_a_step_runs_each_trajectory_through_the_trunk_once(
    llama: str,  # noqa: F811
    tmp_path: Path,
    mode: dict[str, Any],
    where: str,
) -> None:
    model = model_of(llama, cache_gib={"memory": 1.0, "both": 3e-6}.get(where, 0.0), **mode)
    if where in ("file", "both"):
        model.trunk.cache._directory = str(tmp_path)
    fresh = model_of(llama, cache_gib=0.0, **mode)
    expected = gradients(fresh, [pack(PACK)])
    for step in (1, 2):
        model.trunk.new_step()
        with torch.no_grad():  # `values`, packed in one way
            for part in (PACK[:2], PACK[2:]):
                model(pack(part))
        for _ in range(4):  # epochs x critic updates, packed in another
            found = gradients(model, [pack([PACK[4], PACK[0], PACK[3]]), pack([PACK[1], PACK[2]])])
        assert model.trunk.forwards == step * (25 if where == "nowhere" else 5)
    # One denominator is not the point here: with balance shares of parts the gradients differ, so compare the head's.
    torch.testing.assert_close(found["head.weight"], expected["head.weight"], atol=1e-5, rtol=1e-4)
    if where == "both":
        assert model.trunk.cache.bytes_in_memory > 0
        assert model.trunk.cache.bytes_in_file > 0


def test_only_what_is_missing_is_computed_and_lands_in_its_place(folder: str) -> None:  # noqa: F811
    model, fresh = model_of(folder, **ENCODER), model_of(folder, **ENCODER)
    model(pack([PACK[1], PACK[4]]))
    torch.testing.assert_close(model(pack(PACK))[0], fresh(pack(PACK))[0], atol=2e-5, rtol=1e-5)
    assert model.trunk.forwards == 5


def test_the_same_tokens_with_another_prompt_are_another_entry(llama: str) -> None:  # noqa: F811
    model, fresh = model_of(llama, **ENCODER), model_of(llama, **ENCODER)
    t = PACK[0]
    ids = np.concatenate([t.prompt_ids, t.response_ids])
    longer = replace(
        t, prompt_ids=ids[:3], response_ids=ids[3:], action_mask=np.ones(9, bool),
        rollout_logprobs=np.zeros(9, np.float32), values=None, value_targets=None,
    )  # fmt: skip
    model(pack([t]))
    torch.testing.assert_close(model(pack([longer]))[0], fresh(pack([longer]))[0])
    assert model.trunk.forwards == 2
    model(pack([replace(t, sample_index=7)]))  # the same tokens again, whoever sampled them
    assert model.trunk.forwards == 2


def test_only_states_where_values_are_read_are_kept(llama: str) -> None:  # noqa: F811
    model = model_of(llama, **ENCODER)
    model(pack(LONG))
    assert model.trunk.cache.bytes_in_memory == 4 * 121 * ROW
