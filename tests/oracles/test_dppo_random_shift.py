"""The random shift equals DPPO's released augmentation, at the shifts that it drew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import read

from policies.encoders.images import windows

PAD = 4
"""Largest shift of the recorded augmentation, pixels."""


@pytest.mark.golden("dppo_random_shift*.npz")
def test_shifted_images_equal_the_released_augmentation(golden_path: Path) -> None:
    arrays = read(golden_path)
    images = arrays["rgb"].permute(0, 2, 3, 1).unsqueeze(1)  # (B, 1, H, W, 3)
    left, top = (arrays["shift_xy"].long() - PAD).unbind(1)
    assert not torch.equal(left, top) and left.abs().max() <= PAD and top.abs().max() <= PAD
    shifted = windows(images, top, left, (images.shape[2], images.shape[3]))
    found = shifted.squeeze(1).permute(0, 3, 1, 2)
    scale = arrays["rgb"].abs().max().item()
    torch.testing.assert_close(found / scale, arrays["out"] / scale, rtol=1e-4, atol=1e-5)
