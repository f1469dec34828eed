"""Float32 against float32: two processors differ by some 1e-6 of the largest number, so limits are
shares of it.
"""

from typing import Any

import torch


def near(found: Any, wanted: Any, share: float = 1e-5) -> bool:
    """Say whether arrays or tensors have one shape and differ by no more than a share of the
    largest number that is wanted.
    """
    first, second = (torch.as_tensor(each).detach().cpu().double() for each in (found, wanted))
    return first.shape == second.shape and bool((first - second).abs().max() <= share * second.abs().max())
