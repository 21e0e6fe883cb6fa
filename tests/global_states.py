"""The global random states, which whatever takes its randomness as an argument leaves alone."""

from __future__ import annotations

import random

import numpy as np
import torch


def global_states() -> tuple[object, ...]:
    """Return the states of torch, numpy and Python, without drawing from them."""
    numpy_state = [np.asarray(part).tolist() for part in np.random.get_state()]
    return torch.get_rng_state().tolist(), numpy_state, random.getstate()
