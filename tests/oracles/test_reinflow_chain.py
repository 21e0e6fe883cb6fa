"""ReinFlow's noisy chain: states, deviations, log-densities and entropies against the released code.

Files whose sampler used the released grid of times, which its own scoring does not use, are sampled with
`Euler(released_times=True)`; their log-densities are on the right grid.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_chains import bounds_agree, chain_of, policy_of
from official_networks import read
from torch import Tensor

from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.protocols import Cond

FORWARD = {"rtol": 1e-5, "atol": 1e-6}
DENSITY = {"rtol": 1e-4, "atol": 1e-5}

REDUCTIONS = {(1, 1): "mean", (1, 0): "per_step", (0, 1): "per_dim", (0, 0): "joint"}
"""(normalised by the horizon of denoising, by the dimensions of actions) -> our name."""


def cond_of(arrays: dict[str, Tensor]) -> Cond:
    return Cond(arrays["obs"].flatten(1))


def samples_on_the_released_grid(arrays: dict[str, Tensor], path: Path) -> bool:
    return "officialgrid" in path.name and int(arrays["K"]) > 1


@pytest.mark.golden("reinflow_chain_*.npz")
def test_chains_from_given_noise(golden_path: Path) -> None:
    arrays = read(golden_path)
    assert bounds_agree(arrays)
    released = samples_on_the_released_grid(arrays, golden_path)
    policy = policy_of(arrays, released_times=released)
    ratio = chain_of(arrays, policy)
    draws = torch.cat([arrays["x0_noise"][:, None], arrays["step_noise"]], dim=1)
    with torch.no_grad():
        chain, mean, std = ratio.walk(cond_of(arrays), draws)
        quiet = policy.decode(cond_of(arrays), arrays["x0_noise"])
    for ours, theirs in ((chain, "chain"), (mean, "step_mean"), (std, "step_std"), (quiet, "eval_action")):
        torch.testing.assert_close(ours, arrays[theirs], **FORWARD, msg=lambda m, n=theirs: f"{n}: {m}")
    torch.testing.assert_close(chain[:, -1], arrays["action"], **FORWARD)
    own = ratio.reduce(gaussian_log_prob(chain[:, 1:], mean, std), chain)
    torch.testing.assert_close(own, arrays["sample_logprob"], **DENSITY)


@pytest.mark.golden("reinflow_chain_*.npz")
def test_log_densities_and_entropies_in_every_reduction(golden_path: Path) -> None:
    arrays = read(golden_path)
    for counts_start in (0, 1):
        for (by_steps, by_dims), reduction in REDUCTIONS.items():
            ratio = chain_of(arrays, count_start=bool(counts_start), log_prob_reduction=reduction)
            with torch.no_grad():
                log_prob, entropy = ratio.log_prob(cond_of(arrays), arrays["chain"])
                torch.testing.assert_close(
                    ratio.std(cond_of(arrays)).mean(), arrays["mean_std"].float(), **FORWARD
                )
            key = f"init{counts_start}_nh{by_steps}_na{by_dims}"
            torch.testing.assert_close(
                ratio.reduce(log_prob, arrays["chain"]), arrays[f"logprob_{key}"], **DENSITY
            )
            if by_steps:  # the released entropy is divided by the steps whatever `nh` says
                torch.testing.assert_close(ratio.reduce(entropy, None), arrays[f"entropy_{key}"], **DENSITY)


@pytest.mark.golden("reinflow_chain_*.npz")
def test_the_ratio_of_fresh_chains_is_one(golden_path: Path) -> None:
    arrays = read(golden_path)
    ratio, cond = chain_of(arrays), cond_of(arrays)
    draws = torch.cat([arrays["x0_noise"][:, None], arrays["step_noise"]], dim=1)
    with torch.no_grad():
        chain, mean, std = ratio.walk(cond, draws)
        old = ratio.reduce(gaussian_log_prob(chain[:, 1:], mean, std), chain)
        new = ratio.reduce(ratio.log_prob(cond, chain)[0], chain)
    assert float(((new - old).exp() - 1).abs().max()) <= 1e-6
    if not samples_on_the_released_grid(arrays, golden_path):
        torch.testing.assert_close((new - old).exp(), arrays["ratio_first_minibatch"], rtol=0, atol=2e-6)
    start = gaussian_entropy(torch.ones(()))
    assert float(start) > float(gaussian_entropy(std).max())
