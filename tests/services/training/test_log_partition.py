"""Against PyTorch's own, with its gradients."""

import pytest
import torch

from services.training.log_partition import log_partition


@pytest.mark.parametrize("num_rows", [1, 128, 300])
def test_it_is_that_of_all_logits(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    states = torch.randn(num_rows, 32, generator=generator, requires_grad=True)
    head = (0.3 * torch.randn(1000, 32, generator=generator)).requires_grad_()
    weights = torch.randn(num_rows, generator=generator)
    expected = torch.logsumexp(states @ head.T, dim=-1)
    wanted = torch.autograd.grad((weights * expected).sum(), (states, head))
    found = log_partition(states, head)
    # Of a matrix product in bfloat16, where there are units for it.
    assert torch.allclose(found, expected, atol=0.05)
    for own, other in zip(torch.autograd.grad((weights * found).sum(), (states, head)), wanted, strict=True):
        assert (own - other).norm() < 0.02 * other.norm()
