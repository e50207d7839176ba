"""Chunked log-probabilities and entropy: against the naive form, and worked values 5, 7, 18 of the semantics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl import logprobs as module
from rl.logprobs import logprobs_and_entropy


def naive(hidden, weight, targets, temperature):
    """The definition, all logits in memory."""
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def problem(n, d, vocab, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, d, generator=g, dtype=torch.float64) / 3).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (n,), generator=g)


def scalar(logprobs, entropy):
    """Some loss of both outputs, different in every row."""
    a = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    return (a * logprobs).sum() + (a.flip(0) * entropy).sum()


def test_worked_value_5_temperature():
    hidden = torch.eye(3)[:1]
    weight = torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    kept = hidden.clone(), weight.clone()
    calls = [logprobs_and_entropy(hidden, weight, torch.tensor([0]), 0.5, 8)[0].item() for _ in range(2)]
    assert calls[0] == pytest.approx(-0.1429, abs=5e-5)
    assert calls[1] == calls[0]
    assert torch.equal(hidden, kept[0])
    assert torch.equal(weight, kept[1])


def test_worked_value_7_uniform_entropy():
    logprobs, entropy = logprobs_and_entropy(torch.randn(3, 5), torch.zeros(4, 5), torch.tensor([0, 1, 3]), 1.0, 2)
    assert entropy.tolist() == pytest.approx([1.3863] * 3, abs=5e-5)
    assert logprobs.tolist() == pytest.approx([-1.3863] * 3, abs=5e-5)


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_values_and_gradients_are_the_naive_ones(chunk, temperature):
    hidden, weight, targets = problem(50, 12, 97)
    got = logprobs_and_entropy(hidden, weight, targets, temperature, chunk)
    expected = naive(hidden, weight, targets, temperature)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(scalar(*got), (hidden, weight)),
        torch.autograd.grad(scalar(*expected), (hidden, weight)),
    )


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_has_a_gradient_of_its_own(output):
    hidden, weight, targets = problem(9, 4, 11)
    got = logprobs_and_entropy(hidden, weight, targets, 0.9, 4)[output]
    expected = naive(hidden, weight, targets, 0.9)[output]
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), (hidden, weight)),
        torch.autograd.grad(expected.square().sum(), (hidden, weight)),
    )


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = problem(9, 4, 11)
    weight.requires_grad_(False)
    scalar(*logprobs_and_entropy(hidden, weight, targets, 1.0, 4)).backward()
    (expected,) = torch.autograd.grad(scalar(*naive(hidden, weight, targets, 1.0)), hidden)
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


@pytest.mark.parametrize("block", [4, 16384])
def test_bf16_is_float32_inside(block, monkeypatch):
    monkeypatch.setattr(module, "VOCAB_BLOCK", block)
    hidden, weight, targets = problem(20, 16, 33, torch.bfloat16)
    got = logprobs_and_entropy(hidden, weight, targets, 0.8, 8)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected = naive(*wide, targets, 0.8)
    assert got[0].dtype == got[1].dtype == torch.float32
    torch.testing.assert_close(got, expected)
    for g, e in zip(
        torch.autograd.grad(scalar(*got), (hidden, weight)),
        torch.autograd.grad(scalar(*expected), wide),
        strict=True,
    ):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g.float(), e, rtol=2**-8, atol=1e-6)  # rounded once, at the end


def test_large_logits_lose_no_digits():
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[4096.25], [4096.0], [-4096.0]])
    logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([1]), 1.0, 4)
    p = 1 / (1 + math.exp(-0.25))
    assert logprobs.item() == pytest.approx(math.log(1 - p), abs=1e-6)
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_rows_without_weight_touch_no_gradient():
    hidden, weight, targets = problem(6, 4, 11)
    mask = torch.tensor([True, False, True, True, False, True])
    dirty = torch.where(mask[:, None], hidden.detach(), math.nan).requires_grad_()
    logprobs, entropy = logprobs_and_entropy(dirty, weight, targets, 1.0, 2)
    got = torch.autograd.grad(scalar(*(torch.where(mask, x, 0.0) for x in (logprobs, entropy))), (dirty, weight))
    expected = torch.autograd.grad(
        scalar(*(torch.where(mask, x, 0.0) for x in naive(hidden, weight, targets, 1.0))), (hidden, weight)
    )
    torch.testing.assert_close(got, expected)


def test_no_rows():
    hidden, weight, targets = problem(0, 4, 11)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, 1.0, 4)
    assert logprobs.shape == entropy.shape == (0,)
    scalar(logprobs, entropy).backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_0_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature: .* given"):
        logprobs_and_entropy(*problem(2, 3, 4), temperature, 4)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def kept_and_largest(function, hidden, weight):
    """Bytes kept for the backward pass, and elements of the largest tensor of forward and backward."""
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs = function(hidden, weight)
        unseen = [x for x in getattr(outputs[0].grad_fn, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
        assert not unseen, "tensors kept where the hooks do not see them"
        torch.autograd.grad(scalar(*outputs), (hidden, weight))
    return sum(kept.values()), largest.elements


def test_worked_value_18_memory():
    s, vocab, chunk = 1024, 8000, 128
    hidden, weight, targets = problem(s, 32, vocab, torch.float32)
    kept, largest = kept_and_largest(lambda h, w: logprobs_and_entropy(h, w, targets, 1.0, chunk), hidden, weight)
    assert kept < s * vocab * 4 / 4
    assert largest == chunk * vocab
    # The yardstick itself: what the naive form keeps and makes.
    kept, largest = kept_and_largest(lambda h, w: naive(h, w, targets, 1.0), hidden, weight)
    assert kept >= s * vocab * 4
    assert largest == s * vocab
