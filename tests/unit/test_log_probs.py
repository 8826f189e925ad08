import pytest
import torch

from trainer.losses.log_probs import vocab_parallel_log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_match_log_softmax_when_tempered(temperature):
    torch.manual_seed(0)
    logits = (torch.randn(9, 17) * 5).requires_grad_()
    labels = torch.randint(0, 17, (9,))
    upstream = torch.randn(9)
    log_probs, entropy = vocab_parallel_log_probs(logits, labels, temperature)
    (log_probs * upstream).sum().backward()
    gradient, logits.grad = logits.grad, None

    reference = torch.log_softmax(logits / temperature, -1)
    picked = reference.gather(1, labels[:, None])[:, 0]
    (picked * upstream).sum().backward()
    torch.testing.assert_close(log_probs, picked)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=logits / temperature).entropy()
    )
    torch.testing.assert_close(gradient, logits.grad)


def test_log_probs_leave_the_logits_alone_when_they_are_float32():
    logits = torch.randn(4, 8)
    before = logits.clone()
    vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.long))
    assert torch.equal(logits, before)


def test_log_probs_are_float32_when_logits_are_bfloat16():
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.long))
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("of_log_prob", [True, False])
def test_the_entropy_has_the_gradient_of_autograds_when_it_is_in_the_loss(temperature, of_log_prob):
    torch.manual_seed(0)
    logits = (torch.randn(9, 17, dtype=torch.float64) * 5).float().requires_grad_()
    labels, upstream, other = torch.randint(0, 17, (9,)), torch.randn(9), torch.randn(9)
    log_probs, entropy = vocab_parallel_log_probs(logits, labels, temperature)
    loss = (entropy * upstream).sum() + ((log_probs * other).sum() if of_log_prob else 0)
    (gradient,) = torch.autograd.grad(loss, logits)
    reference = torch.log_softmax(logits / temperature, -1)
    loss = (-(reference.exp() * reference).sum(-1) * upstream).sum()
    if of_log_prob:
        loss = loss + (reference.gather(1, labels[:, None])[:, 0] * other).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, logits)[0], atol=1e-5, rtol=1e-4)


def test_the_entropys_gradient_is_finite_when_a_token_is_impossible():
    logits = torch.tensor([[0.0, -1000.0, 3.0]], requires_grad=True)
    _, entropy = vocab_parallel_log_probs(logits, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 1] == 0
