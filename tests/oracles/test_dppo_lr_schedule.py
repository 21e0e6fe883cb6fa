"""Learning rates against reference numbers."""

from pathlib import Path

import numpy as np
import pytest

from algos.optim import warmup_cosine


@pytest.mark.golden("dppo_lr_schedule*.npz")
def test_warmup_cosine_matches_reference(golden_path: Path) -> None:
    data = np.load(golden_path)
    assert data.files
    for name in data.files:
        cycle, warmup, lr, min_lr = name.split("_")[-4:]
        ours = [
            warmup_cosine(n, lr=float(lr), min_lr=float(min_lr), warmup=int(warmup), cycle=int(cycle))
            for n in range(len(data[name]))
        ]
        np.testing.assert_allclose(ours, data[name], rtol=1e-9, atol=1e-15, err_msg=name)
