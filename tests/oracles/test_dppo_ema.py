"""Averaged weights against reference numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from algos.optim import DelayedDecay, Ema


@pytest.mark.golden("dppo_ema*.npz")
def test_delayed_average_matches_reference(golden_path: Path) -> None:
    data = np.load(golden_path)
    weights, epoch = torch.tensor(data["weights_after_batch"]), data["epoch_of_batch"]
    start = int(np.argmax(epoch >= int(data["epoch_start_ema"])))
    rule = DelayedDecay(value=float(data["decay"]), start=start, every=int(data["update_ema_freq"]))
    net = nn.Linear(weights.shape[1], 1, bias=False)
    ema = Ema(net, rule)
    for n, row in enumerate(weights):
        with torch.no_grad():
            net.weight.copy_(row)
        ema.update(net)
        np.testing.assert_allclose(
            ema.module.weight[0].numpy(), data["ema_after_batch"][n], rtol=1e-5, atol=1e-6
        )
