import numpy as np
import pytest
import torch

from async_rl.types import SamplingMask
from benchmarks.logits_memory import PeakBytes
from trainer.losses import log_probs as log_probs_module
from trainer.losses.log_probs import KeptTokens, vocab_parallel_log_probs

ROWS, HIDDEN, VOCABULARY = 9, 6, 17


@pytest.fixture(params=["in one part", "in parts of 2 rows"], autouse=True)
def parts(request, monkeypatch):
    if request.param != "in one part":
        monkeypatch.setattr(log_probs_module, "LOGITS_AT_ONCE", 2 * VOCABULARY)


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    hidden = (torch.randn(ROWS, HIDDEN) * 2).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,))


def plain(hidden, weight, labels, temperature=1.0):
    """Log-probs and entropies by autograd's softmax over all logits at once, in float64."""
    log_p = torch.log_softmax((hidden.double() @ weight.double().t()) / temperature, -1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("of_log_prob", [True, False])
@pytest.mark.parametrize("of_entropy", [True, False])
def test_log_probs_entropy_and_gradients_are_those_of_log_softmax_and_autograd(
    temperature, of_log_prob, of_entropy
):
    def results(function):
        hidden, weight, labels = inputs()
        log_probs, entropy = function(hidden, weight, labels, temperature)
        terms = [(log_probs * upstream).sum() for _ in [0] if of_log_prob]
        terms += [(entropy * other).sum() for _ in [0] if of_entropy]
        gradients = torch.autograd.grad(sum(terms), (hidden, weight)) if terms else ()
        return log_probs.float(), entropy.float(), *gradients

    upstream, other = torch.randn(ROWS), torch.randn(ROWS)
    for one, expected in zip(results(vocab_parallel_log_probs), results(plain), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-4)


MASK = SamplingMask.of([[0, 3, 5], [16], [], [2, 1, 7, 9], [4, 16], [8, 0], [11, 12], [], [6, 10, 13]])
"""Rows 2 and 7 are not truncated, row 1 keeps one token."""

LABELS = torch.tensor([3, 16, 2, 9, 4, 0, 11, 16, 13])


def truncated(hidden, weight, labels, temperature):
    """As `plain`, over the kept tokens of `MASK` only."""
    logits = (hidden.double() @ weight.double().t()) / temperature
    kept = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    for row in range(ROWS):
        ids = MASK[row : row + 1].token_ids.astype(np.int64)
        kept[row, ids if len(ids) else slice(None)] = True
    log_p = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1)
    of_label = log_p.gather(1, labels[:, None])[:, 0]
    log_p = log_p.masked_fill(~kept, 0)
    return of_label, -(log_p.exp() * log_p * kept).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [True, False])
def test_truncated_distributions_are_renormalised_with_their_gradients(temperature, entropy):
    hidden, weight, _ = inputs()
    kept = KeptTokens.of(MASK, torch.device("cpu"))
    found = vocab_parallel_log_probs(hidden, weight, LABELS, temperature, kept=kept)
    expected = truncated(hidden, weight, LABELS, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=1e-5)
    assert found[0][1] == 0  # one token was kept, so it is certain
    upstream, other = torch.randn(ROWS), torch.randn(ROWS)

    def gradients(results):
        total = (results[0] * upstream).sum() + (results[1] * other).sum() * entropy
        return torch.autograd.grad(total, (hidden, weight))

    for one, expected_one in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(one, expected_one, atol=1e-5, rtol=1e-4)


def test_tokens_of_other_parts_of_the_vocabulary_are_left_to_their_ranks():
    kept = KeptTokens.of(MASK, torch.device("cpu"))
    whole = torch.randn(ROWS, VOCABULARY)
    parts = [whole[:, :9].clone(), whole[:, 9:].clone()]
    kept.exclude(parts[0], 0, 0)
    kept.exclude(parts[1], 0, 9)
    kept.exclude(whole, 0, 0)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert (whole > -1e29).sum(1).tolist() == [3, 1, 17, 4, 2, 2, 2, 17, 3]


def test_gradients_have_the_type_of_the_model_and_are_rounded_once_when_it_is_bfloat16():
    hidden, weight, labels = inputs(torch.bfloat16)
    log_probs, entropy = vocab_parallel_log_probs(hidden, weight, labels)
    assert log_probs.dtype == entropy.dtype == torch.float32
    found = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
    log_probs, entropy = plain(hidden, weight, labels)
    expected = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.02 * other.norm()


def test_the_gradient_of_a_likely_token_is_not_lost_when_it_is_nearly_certain():
    hidden = torch.tensor([[1.0, 12.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.eye(2, dtype=torch.bfloat16)
    log_probs, _ = vocab_parallel_log_probs(hidden, weight, torch.tensor([1]))
    (gradient,) = torch.autograd.grad(log_probs.sum(), hidden)
    torch.testing.assert_close(gradient[0, 1].item(), 1.67e-5, atol=0, rtol=0.01)


def test_the_entropys_gradient_is_finite_when_a_token_is_impossible():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [-1000.0], [3.0]], requires_grad=True)
    _, entropy = vocab_parallel_log_probs(hidden, weight, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(entropy.sum(), weight)
    assert torch.isfinite(gradient).all()
    assert gradient[1, 0] == 0


def test_rows_of_padding_have_no_part_when_the_vocabulary_was_padded():
    hidden, weight, labels = inputs()
    padded = torch.cat([weight.detach(), torch.full((3, HIDDEN), 5.0)]).requires_grad_()
    expected = vocab_parallel_log_probs(hidden, weight, labels)
    found = vocab_parallel_log_probs(hidden, padded, labels, vocabulary=VOCABULARY)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    of_padded = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, padded))
    of_plain = torch.autograd.grad(expected[0].sum() + expected[1].sum(), (hidden, weight))
    assert torch.equal(of_padded[0], of_plain[0])
    assert torch.equal(of_padded[1][:VOCABULARY], of_plain[1])
    assert not of_padded[1][VOCABULARY:].any()


def test_gradients_are_zero_when_no_token_is_trained_on():
    hidden, weight, labels = inputs()
    log_probs, entropy = vocab_parallel_log_probs(hidden[:0], weight, labels[:0])
    for gradient in torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight)):
        assert not gradient.any()


@pytest.mark.real
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_grows_only_by_hidden_states_when_there_are_more_tokens(dtype, entropy, monkeypatch):
    monkeypatch.setattr(log_probs_module, "LOGITS_AT_ONCE", 1 << 16)
    vocabulary, size = 4096, 32

    def peak(tokens):
        hidden = torch.randn(tokens, size, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocabulary, size, dtype=dtype, requires_grad=True)
        with PeakBytes() as counter:
            log_probs, entropies = vocab_parallel_log_probs(
                hidden, weight, torch.zeros(tokens, dtype=torch.int64)
            )
            (log_probs.sum() + (entropies.sum() if entropy else 0)).backward()
        return counter.peak

    few, many = 64, 1024
    per_token = (peak(many) - peak(few)) / (many - few)
    numbers_per_row = 40  # float32 and int64: labels, sums, log-probs, entropies and their gradients
    assert per_token < size * dtype.itemsize + 4 * numbers_per_row
