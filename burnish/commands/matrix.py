"""Page of algorithms and processes: `python -m burnish.commands.matrix` writes docs/algorithms/matrix.md.

A cell is asked of the algorithm (`check_policy`) with an untrained policy of the process's default sampler.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from algos.dsrl import DsrlConfig
from algos.onpolicy.requirements import algorithms_for
from burnish.console import output
from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.policy_config import PolicyConfig

PAGE = "docs/algorithms/matrix.md"
NO = "–"
PAGES = {"awm": "fpo", "rlpd": "sac"}

INTRODUCTION = """# Which algorithm improves which policy

Rows are processes (`process=<name>` in cloning), columns are algorithms that learn in an environment
(`algo=<name>`). This page is written by `python -m burnish.commands.matrix` from the registered parts. Tests
compare the two, expect a refusal at every {no}, and run every other pair; ratios are 1 on fresh data.

A cell tells how a clone with the default sampler of its process explores:

- [DPPO](dppo.md): the sampler. A floor of noise follows every step, and the steps have densities.
- [ReinFlow](reinflow.md): the sampler. Learned noise follows every step, and the whole chain has a density.
- [FPO and AWM](fpo.md): the quantity whose losses are compared. The policy's own sampler acts.
- [PPO](ppo.md): it draws from its density. [PolicyFlow](policyflow.md): noise on the end of a flow.
- [SAC and RLPD](sac.md): it draws from its density. [DSRL](dsrl.md): the start noise is chosen, directly or
  with that many `algo.denoising_steps`. [GoRL](ppo.md#on-latents-algogorl): the start noise is drawn.
"""

CLOSING = """
Without `init` a new policy learns from the reward alone, under all of them but DSRL
([from scratch](ppo.md#from-scratch)).

## What is required

| algorithm | |
|---|---|
"""

WAYS = """
A refusal names an algorithm that takes the very policy:

| process | algorithm |
|---|---|
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m burnish.commands.matrix", description="Write the page of algorithms and processes."
    )
    parser.add_argument("path", nargs="?", default=PAGE)
    path = Path(parser.parse_args(arguments).path)
    path.write_text(page(), encoding="utf-8")
    output().print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def algorithms() -> dict[str, Any]:
    """Return the algorithms that learn in an environment, with their defaults."""
    return {name: part() for name, part in registry.parts("algo").items() if hasattr(part, "check_policy")}


@cache
def policy_of(process: str) -> Policy:
    """Return a small untrained policy of a process."""
    config = PolicyConfig(
        process=registry.lookup("process", process)(),
        backbone=MlpConfig(width=8, time_dim=4),
        horizon=1,
        act_steps=1,
    )
    return build_policy(config, obs_dim=1, action_dim=1)


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the pairs (algorithm, process) that go together."""
    for name, config in algorithms().items():
        for process in registry.names("process"):
            if cell(config, process) != NO:
                yield name, process


def cell(config: Any, process: str) -> str:
    """Return how a policy explores under an algorithm; `NO` if it is refused."""
    policy = policy_of(process)
    try:
        policy = config.check_policy(policy)
    except CapabilityError:
        return _with_steps(config, policy)
    if hasattr(config, "samplers"):
        return f"`{registry.name_of('sampler', config.samplers(policy)[0])}`"
    if hasattr(config, "matching"):
        return f"`{config.matching(policy).prediction}`"
    return "yes"


def _with_steps(config: Any, policy: Policy) -> str:
    """Return the steps with which an algorithm takes a policy after all; `NO` if it does not."""
    steps = getattr(policy, "table", None)
    if steps is None or not isinstance(config, DsrlConfig):
        return NO
    for number in (5, 1):
        with suppress(CapabilityError):
            replace(config, denoising_steps=number).check_policy(policy)
            return str(number)
    return NO


def page() -> str:
    """Return the page in Markdown."""
    found = algorithms()
    lines = [INTRODUCTION.format(no=NO), _row("", *found), _row(*["---"] * (len(found) + 1))]
    lines += [
        _row(f"`{process}`", *(cell(config, process) for config in found.values()))
        for process in registry.names("process")
    ]
    lines += [CLOSING.rstrip("\n")]
    lines += [_row(f"`{name}`", config.requires) for name, config in found.items()]
    return "\n".join(lines) + "\n" + WAYS + "\n".join(_row(*row) for row in _ways()) + "\n"


def _ways() -> Iterator[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for process in registry.names("process"):
        found.setdefault(algorithms_for(policy_of(process)), []).append(f"`{process}`")
    for way, processes in found.items():
        yield ", ".join(processes), re.sub(r"(\w+=\S+)", r"`\1`", way)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
