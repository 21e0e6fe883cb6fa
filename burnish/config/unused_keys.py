"""What is typed of a training and would have no effect: refused, or warned of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser

from policies import registry
from policies.build import complete
from policies.errors import ConfigError
from policies.policy import PART_GROUPS, Policy, PolicyConfig

if TYPE_CHECKING:
    from burnish.config.train import TrainConfig

_log = logging.getLogger(__name__)


def refuse_a_new_policy_beside_init(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Refuse what was typed about a new policy where the one of `init` is taken as it is.

    Raises:
        ConfigError: If anything was.
    """
    typed = [] if config.init is None else _typed_about_a_policy(overrides)
    if typed:
        raise ConfigError(
            f"init={config.init} is a whole policy, so {', '.join(typed)} would have no effect. Leave "
            f"{'it' if len(typed) == 1 else 'them'} out, or train a new policy without init."
        )


def refuse_a_new_policy_where_algo_makes_it(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Refuse what was typed about a new policy where the algorithm decides what that is.

    Raises:
        ConfigError: If anything was.
    """
    if config.init is not None or not getattr(config.algo, "makes_policy", False):
        return
    if typed := _typed_about_a_policy(overrides):
        algo = registry.name_of("algo", config.algo)
        raise ConfigError(
            f"algo={algo} makes its own actor (see algo.hidden_dims), so {', '.join(typed)} would have no "
            "effect. Leave it out; or clone a policy of that kind with algo=bc and give it as init."
        )


def _typed_about_a_policy(overrides: Sequence[str]) -> list[str]:
    """Return the keys among overrides that say what a new policy is."""
    return [key for key in keys_of(overrides) if key.partition(".")[0] in (*PART_GROUPS, "policy")]


def keys_of(overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups of overrides."""
    parser = OverridesParser.create()
    return [str(parser.parse_override(text).key_or_group) for text in overrides]


def say_where_nothing_is_evaluated(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Warn of what was typed about evaluations where there is no task to evaluate in."""
    if config.env is not None or config.evaluation.episodes == 0:
        return
    if vain := [key for key in keys_of(overrides) if key.startswith(("evaluation.", "trainer.eval_"))]:
        _log.warning("nothing is evaluated, in spite of %s: give env=<task> as well.", ", ".join(vain))
    elif getattr(config.algo, "makes_policy", False):
        _log.info("nothing is evaluated while training: give env=<task> for that.")


def say_what_init_replaces(config: TrainConfig, init: Policy) -> None:
    """Warn of what an experiment sets about a new policy and the one of `init` has otherwise."""
    wanted, default = config.policy_config(), complete(PolicyConfig())
    vain = [
        f.name
        for f in fields(PolicyConfig)
        if (value := getattr(wanted, f.name)) is not None
        if value not in (getattr(default, f.name), getattr(init.config, f.name))
    ]
    if vain:
        _log.warning(
            "the policy of init keeps its own %s; this configuration's has no effect.", ", ".join(vain)
        )
