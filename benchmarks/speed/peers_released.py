"""Released programs of offline learning as peers: their classes, read from a folder, at their defaults.

Only the file with the update is loaded. Empty modules stand in for what its own loop imports besides.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 256
Sampled = list[Tensor]
"""State, action, reward (B, 1), next state, and end (B, 1), of PRDC and A2PR its opposite."""


def load(folder: Path, file: str) -> Any:
    """Return the module of a file, whose own imports are relative to the folder."""
    if not (folder / file).is_file():
        raise SystemExit(f"{folder / file} is missing: --programs must hold the released programs.")
    empty = {name: ModuleType(name) for name in ("wandb", "pyrallis", "d4rl", "gym")}
    vars(empty["gym"])["Env"], vars(empty["pyrallis"])["wrap"] = object, lambda: lambda function: function
    known = dict(sys.modules)
    sys.modules.update(empty)
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"released_{Path(file).stem}", folder / file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
        for name, other in list(sys.modules.items()):  # two programs have packages of the same name
            if name in empty or str(folder) in str(vars(other).get("__spec__")):
                del sys.modules[name]
        sys.modules.update({name: known[name] for name in empty if name in known})
    return module


@dataclass(frozen=True)
class Released:
    """A program with its buffer.

    `networks` and `optimizers` are those of the actor, the critics, and what else the method trains, in our
    order; `targets` pairs target copies with their networks.
    """

    learner: Any
    train: Callable[[Sampled], object]
    sample: Callable[[], Sampled]
    networks: Sequence[Sequence[nn.Module]]
    optimizers: Sequence[Sequence[torch.optim.Optimizer]]
    targets: Sequence[tuple[nn.Module, nn.Module]]
    marks_ends: bool

    def step(self) -> None:
        """Draw a batch and learn from it."""
        self.train(self.sample())

    def weights(self) -> list[list[nn.Parameter]]:
        """Return the parameters of every network."""
        return [[p for module in modules for p in module.parameters()] for modules in self.networks]

    def moments(self) -> list[list[Tensor]]:
        """Return Adam's means of gradients, as `weights`."""
        states = [{p: s for one in group for p, s in one.state.items()} for group in self.optimizers]
        return [[state[p]["exp_avg"] for p in own] for state, own in zip(states, self.weights(), strict=True)]

    @torch.no_grad()
    def take(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """Copy weights, also into the target copies."""
        for own, given in zip(self.weights(), weights, strict=True):
            for parameter, value in zip(own, given, strict=True):
                parameter.copy_(value)
        for target, online in self.targets:
            target.load_state_dict(online.state_dict())


def corl(programs: Path, method: str, arrays: dict[str, np.ndarray]) -> Released:
    """Return TD3+BC or IQL of CORL with its own buffer."""
    module = load(programs / "CORL", f"algorithms/offline/{method}.py")
    states, actions = arrays["state"].shape[1], arrays["action"].shape[1]
    buffer = module.ReplayBuffer(states, actions, len(arrays["state"]))
    rows = {
        "observations": arrays["state"], "actions": arrays["action"], "rewards": arrays["reward"][:, 0],
        "next_observations": arrays["next_state"], "terminals": arrays["discount"][:, 0] == 0,
    }  # fmt: skip
    with redirect_stdout(StringIO()):
        buffer.load_d4rl_dataset(rows)
    adam = lambda net: torch.optim.Adam(net.parameters(), lr=3e-4)  # noqa: E731
    sample = lambda: buffer.sample(BATCH)  # noqa: E731
    if method == "td3_bc":
        nets = [module.Actor(states, actions, 1.0), *(module.Critic(states, actions) for _ in range(2))]
        optimizers = [adam(net) for net in nets]
        one = module.TD3_BC(1.0, *(part for pair in zip(nets, optimizers, strict=True) for part in pair))
        copies = (one.actor_target, one.critic_1_target, one.critic_2_target)
        targets = list(zip(copies, nets, strict=True))
        groups, adams = (nets[:1], nets[1:]), (optimizers[:1], optimizers[1:])
        return Released(one, one.train, sample, groups, adams, targets, True)
    actor = module.GaussianPolicy(states, actions, 1.0)
    nets = [actor, module.TwinQ(states, actions), module.ValueFunction(states)]
    optimizers = [adam(net) for net in nets]
    one = module.ImplicitQLearning(
        1.0, *(part for pair in zip(nets, optimizers, strict=True) for part in pair)
    )
    groups = [[net] for net in (actor.net, *nets[1:])]
    adams, targets = [[each] for each in optimizers], [(one.q_target, one.qf)]
    return Released(one, one.train, sample, groups, adams, targets, True)


def lamda(programs: Path, method: str, arrays: dict[str, np.ndarray], **given: Any) -> Released:
    """Return PRDC or A2PR with its own buffer; the two programs are built alike."""
    folder = programs / method.upper()
    buffers = load(folder, "utils/buffer.py")
    states, actions = arrays["state"].shape[1], arrays["action"].shape[1]
    buffer = buffers.ReplayBuffer(states, actions, "cpu", "hopper", scale=1, shift=0, max_size=1)
    buffer.state, buffer.action, buffer.reward = (arrays[name] for name in ("state", "action", "reward"))
    buffer.next_state, buffer.not_done = arrays["next_state"], 1.0 * (arrays["discount"] != 0)
    buffer.size = len(buffer.state)
    with redirect_stdout(StringIO()):
        if method == "prdc":
            keys = np.hstack([given["beta"] * arrays["state"], arrays["action"]])
            one = load(folder, "prdc.py").PRDC(keys, states, actions, 1.0, "cpu", **given)
        else:
            one = load(folder, "A2PR.py").A2PR(states, actions, 1.0, "cpu", **given)
    parts = ("actor", "critic") if method == "prdc" else ("actor", "critic", "value", "vae")
    return Released(
        one,
        lambda batch: one.train(SimpleNamespace(sample=lambda _: batch), BATCH),
        lambda: buffer.sample(BATCH),
        [[getattr(one, part)] for part in parts],
        [[getattr(one, f"{part}_optimizer")] for part in parts],
        [(one.actor_target, one.actor), (one.critic_target, one.critic)],
        False,
    )
