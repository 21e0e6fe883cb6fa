"""Diffusion Policy's U-Net against LeRobot's diffusion policy: `--peers`, in an environment with lerobot.

Its policy is imported as a user's would be, so both sides have the same weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup
from algos.bc import Bc, BcConfig
from benchmarks.speed.peers import program
from benchmarks.speed.sides import episodes, require_close
from benchmarks.speed.timing import Figure, compare
from policies.backbones.unet1d import Unet1dConfig
from policies.denoising import DenoisingPolicy
from policies.importing.importing import import_policy
from policies.importing.lerobot import LerobotSource
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion

STATE, ENV, ACTION = "observation.state", "observation.environment_state", "action"
SIZES, ACTION_DIM, OBS_STEPS, HORIZON, LEVELS = {STATE: 2, ENV: 18}, 2, 2, 16, 100
LARGE, SMALL = (256, 512, 1024), (64, 128, 256)
"""Widths of Diffusion Policy's U-Net for Push-T, and of one that is trained on a CPU."""
TIME, BATCH, BLOCK = 256, 64, 5


class StandIn(ModuleType):
    """A package whose names are there and do nothing: torchvision, which policies of states do not use."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns:
    """Finds a package that is missing, and its modules."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of the package or one of its modules."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == self.package else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def lerobot_policy(widths: tuple[int, ...]) -> Any:
    """Return LeRobot's policy of states with random weights, sampled by ten DDIM steps."""
    if find_spec("torchvision") is None:
        sys.meta_path.append(StandIns("torchvision"))
    modeling = program("lerobot.policies.diffusion.modeling_diffusion", "lerobot")
    types = program("lerobot.configs.types", "lerobot")
    torch.manual_seed(0)
    kinds = {STATE: types.FeatureType.STATE, ENV: types.FeatureType.ENV}
    config = modeling.DiffusionConfig(
        input_features={name: types.PolicyFeature(kinds[name], (size,)) for name, size in SIZES.items()},
        output_features={ACTION: types.PolicyFeature(types.FeatureType.ACTION, (ACTION_DIM,))},
        normalization_mapping=dict.fromkeys(("STATE", "ENV", "ACTION"), types.NormalizationMode.IDENTITY),
        down_dims=widths,
        diffusion_step_embed_dim=TIME,
        n_obs_steps=OBS_STEPS,
        horizon=HORIZON,
        n_action_steps=1,
        drop_n_last_frames=HORIZON - OBS_STEPS,
        noise_scheduler_type="DDIM",
        num_train_timesteps=LEVELS,
        num_inference_steps=10,
        device="cpu",
        push_to_hub=False,
    )
    return modeling.DiffusionPolicy(config).eval()


def imported(peer: Any) -> DenoisingPolicy:
    """Return our policy with the peer's weights."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
            (Path(folder) / name).write_text(json.dumps({"steps": []}))
        policy, _ = import_policy(Path(folder) / "model.safetensors", LerobotSource())
    assert isinstance(policy, DenoisingPolicy)
    return policy.eval()


def small_cloning() -> tuple[Callable[[], object], int]:
    """Return a block of our steps of cloning the small U-Net, and how many."""
    return cloning_run().advance, BLOCK


def cloning_run() -> Bc:
    """Return our cloning of the small U-Net from random episodes of 500 steps."""
    rows, generator = 20_000, torch.Generator().manual_seed(5)
    states = torch.rand(rows, sum(SIZES.values()), generator=generator) * 2 - 1
    actions = torch.rand(rows, ACTION_DIM, generator=generator) * 2 - 1
    policy = PolicyConfig(
        process=VPDiffusion(num_levels=LEVELS, prediction="eps"),
        backbone=Unet1dConfig(widths=SMALL, time_dim=TIME, film="scale", final_groups=8),
        obs_steps=OBS_STEPS,
        horizon=HORIZON,
        act_steps=8,
        action_start=OBS_STEPS - 1,
    )
    config = BcConfig(
        steps=10**9, batch_size=BATCH, log_every=BLOCK, validation_fraction=0.0, validation_every=0
    )
    run: Bc = config.build(Setup(policy=policy, dataset=episodes(states, actions, 500)))
    return run


def lerobot(options: argparse.Namespace) -> Iterator[Figure]:
    """A decision of the large U-Net, and a step of cloning the small one; CPU time of one thread."""
    peer = lerobot_policy(LARGE)
    ours, generator = imported(peer), torch.Generator().manual_seed(1)
    states = {name: torch.rand(1, size, generator=generator) * 2 - 1 for name, size in SIZES.items()}
    start = torch.randn(1, HORIZON, ACTION_DIM, generator=generator)
    obs = torch.cat(list(states.values()), dim=1)[:, None].repeat(1, OBS_STEPS, 1)
    for _ in range(OBS_STEPS):
        theirs = peer.select_action(dict(states), noise=start)
    require_close("lerobot, a decision", ours.act(obs, noise=start)[:, 0], theirs, 5e-5)
    yield compare(
        "U-Net of 66 M, a decision",
        ("policy.act", lambda: ours.act(obs, noise=start)),
        ("LeRobot", lambda: peer.select_action(dict(states), noise=start)),
        1.7,
        rounds=options.rounds,
        clock=time.process_time,
    )
    yield cloning(options)


def cloning(options: argparse.Namespace) -> Figure:
    """Compare the gradients of both sides, and time whole steps; LeRobot's batch is ready-made."""
    peer, run = lerobot_policy(SMALL), cloning_run()
    run.policy.field.load_state_dict(imported(peer).field.state_dict())  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(2)
    batch: dict[str, Tensor] = {
        name: torch.rand(BATCH, OBS_STEPS, size, generator=generator) * 2 - 1 for name, size in SIZES.items()
    }
    batch[ACTION] = torch.rand(BATCH, HORIZON, ACTION_DIM, generator=generator) * 2 - 1
    batch["action_is_pad"] = torch.zeros(BATCH, HORIZON, dtype=torch.bool)
    require_equal_gradients(peer, run, batch)
    optimizer = torch.optim.Adam(peer.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    peer.train()

    def step() -> None:
        for _ in range(BLOCK):
            optimizer.zero_grad()
            peer.forward(dict(batch))[0].backward()
            optimizer.step()

    sides, clock = (("Bc.advance", run.advance), ("LeRobot", step)), time.process_time
    return compare("U-Net, BC step, batch 64", *sides, 1.4, rounds=options.rounds, clock=clock, steps=BLOCK)


def require_equal_gradients(peer: Any, run: Bc, batch: dict[str, Tensor]) -> None:
    """Compare losses and all gradients for the same noise and noise levels; imports the latter as weights."""
    torch.manual_seed(3)
    theirs = peer.forward(dict(batch))[0]
    theirs.backward()
    torch.manual_seed(3)
    eps, level = torch.randn(batch[ACTION].shape), torch.randint(0, LEVELS, (BATCH,))
    noisy = peer.diffusion.noise_scheduler.add_noise(batch[ACTION], eps, level)
    policy, field = imported(peer), run.policy.field  # type: ignore[attr-defined]
    cond = policy.encode({"state": torch.cat([batch[name] for name in SIZES], dim=2)})
    loss = (field(noisy, level.float(), cond) - eps).square().mean()
    require_close("lerobot, loss", loss.detach(), theirs.detach(), 1e-5)
    ours = torch.autograd.grad(loss, list(field.parameters()))
    slopes = copy.deepcopy(peer)
    with torch.no_grad():
        for weight, source in zip(slopes.parameters(), peer.parameters(), strict=True):
            weight.copy_(source.grad)
    for mine, other in zip(ours, imported(slopes).field.parameters(), strict=True):
        difference, size = (mine - other.detach()).norm(), float(other.detach().norm())
        require_close("lerobot, gradients", difference, 0.0, 1e-4 * size)
