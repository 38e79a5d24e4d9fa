"""Double precision, for sums that must not round."""

import torch


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision: on its device, or on the CPU where that has none (Apple's MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
