"""Where a run of an on-policy algorithm begins: at a given policy, or at a new one."""

from __future__ import annotations

from typing import Any

from algos.base import Setup
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.loop import check_setup
from algos.onpolicy.running_normalizer import RunningMeanStd, fresh_policy, running_moments
from policies.errors import ConfigError
from policies.registry import name_of


def starting_policy(config: OnPolicyConfig, setup: Setup) -> tuple[Any, dict[str, RunningMeanStd] | None]:
    """Return `setup.init`, or a new policy that learns from the reward alone, checked.

    The second value holds the observation statistics of a new policy whose normaliser is fitted during
    training; else None.

    Raises:
        ConfigError: If the environment is missing, sizes disagree, or a new policy lacks observation
            statistics or a reference for the behaviour-cloning term.
        CapabilityError: If the policy lacks what the algorithm requires.
    """
    algo = name_of("algo", config)
    if setup.init is not None:
        return config.check_policy(check_setup(setup, algo)), None
    if config.bc_weight:
        raise ConfigError(
            f"algo.bc_weight={config.bc_weight} needs a reference: give init=<policy directory>."
        )
    policy = config.check_policy(fresh_policy(setup, algo))
    is_fitted = policy.normalizer.modes["state"] == "gaussian"
    return policy, running_moments(policy) if is_fitted else None
