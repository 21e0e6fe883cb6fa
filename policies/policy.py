"""Policies: the module that training, evaluation and export share.

A policy combines an encoder, a normaliser, a network, a process (meaning of the network output), a sampler
(integration of the network) and the horizons of its action chunk. All quantities are in normalised units
unless named `physical`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policies.encoders import Encoder, ImageShape, ObservationSizes
from policies.errors import CapabilityError, ConfigError
from policies.networks.recorded import Recorded
from policies.networks.weight_cache import forget
from policies.normalizer import Normalizer
from policies.policy_config import PolicyConfig
from policies.protocols import Cond, Hooks, Observation, Reduction, Rng, Start

_RECORDED: WeakKeyDictionary[Policy, tuple[Any, Recorded[Tensor]]] = WeakKeyDictionary()
"""Policy -> (what its recorded kernels depend on, these kernels)."""
_CPU_ROWS = 1024  # rows that a CPU decides for at once; more do not fit into its caches
_REGISTERED = ("_modules", "_parameters", "_buffers")  # where a module keeps what is assigned to it


def _present_features(modes: Mapping[str, str], dims: Mapping[str, int]) -> list[str]:
    """Return the names of features of positive width; each of them requires a mode."""
    present = [name for name, dim in dims.items() if dim]
    if unknown := sorted(set(modes) - set(dims)):
        raise ConfigError(f"policy.normalizer knows {', '.join(dims)}; got {', '.join(unknown)}.")
    if missing := [name for name in present if name not in modes]:
        raise ConfigError(f"policy.normalizer must give a mode to {', '.join(missing)} as well.")
    return present


def _described(obs: Any) -> str:
    return f"keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else f"an object {type(obs).__name__}"


def require_finite(obs: Observation) -> None:
    """Refuse NaN and infinite numbers on the CPU; elsewhere a check would wait for the device.

    A sum is cheaper than a look at every number, and finite only if all of them are.

    Raises:
        ConfigError: Names the entry.
    """
    for name, value in obs.items():
        if value.device.type != "cpu" or not value.is_floating_point() or math.isfinite(float(value.sum())):
            continue
        if len(bad := (~value.isfinite()).nonzero()):
            place = bad[0].tolist()
            found = float(value[tuple(place)])
            raise ConfigError(f"observation '{name}' must be finite; got {found} at {place}.")


class Policy(nn.Module):
    """Base class of all policies: observations in, executed actions out.

    Args:
        config: Complete configuration (no part is None).
        obs_dim: Do, width of one observation.
        action_dim: Da, width of one action.
        goal_dim: Dg, 0 without goals.
        images: Image shapes (H, W, 3) by camera.
    """

    noise_sensitive = True
    """Whether the chunk depends on the noise."""
    chooses: Any = False
    """Whether one of several chunks is executed, which differ by their noise."""
    provenance: Mapping[str, Any] = MappingProxyType({})
    """Facts of the directory that it was loaded from (task, algorithm, data); views and copies keep them."""
    can_drop_goals: ClassVar[bool] = False
    """Whether it can learn without goal too, for classifier-free guidance."""

    def __init__(
        self,
        config: PolicyConfig,
        *,
        obs_dim: int,
        action_dim: int,
        goal_dim: int = 0,
        images: Mapping[str, ImageShape] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk = config.chunk(action_dim)
        sizes = ObservationSizes(obs_dim, config.obs_steps, goal_dim, images or {})
        self.encoder: Encoder = config.encoder.build(sizes)
        dims = {"state": obs_dim, "goal": goal_dim, "action": action_dim}
        modes = {k: config.normalizer[k] for k in _present_features(config.normalizer, dims)}
        clip = config.observation_clip
        clips = {} if clip is None else {k: clip for k in modes if k != "action"}
        self.normalizer = Normalizer(modes, dims, clips)
        self._check_guidance()

    @property
    def obs_dim(self) -> int:
        return self.encoder.sizes.obs_dim

    @property
    def goal_dim(self) -> int:
        return self.encoder.sizes.goal_dim

    @property
    def images(self) -> Mapping[str, ImageShape]:
        return self.encoder.sizes.images

    @property
    def _like(self) -> Tensor:
        """A buffer, for the device and the dtype of the policy."""
        return self.normalizer.action_scale  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def observation(self, obs: Any) -> Observation:
        """Convert an observation (array, tensor, or mapping of them) to tensors of the policy's dtype.

        Raises:
            ConfigError: If it holds something else, or no `state`; names the expected keys.
        """
        items = obs if isinstance(obs, Mapping) else {"state": obs}
        like, images = self._like, self.images
        dtypes = {name: None if name in images else like.dtype for name in items}  # images stay bytes
        try:
            tensors = {k: torch.as_tensor(v, dtype=dtypes[k], device=like.device) for k, v in items.items()}
        except (TypeError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise ConfigError(f"{self._expected()}; got {_described(obs)}: {reason}.") from error
        if "state" not in tensors or not tensors["state"].ndim:
            raise ConfigError(f"{self._expected()}; got {_described(obs)}.")
        return tensors

    def _expected(self) -> str:
        """Return the part of an error that says which observation the policy needs."""
        sizes = self.encoder.sizes
        shapes: dict[str, tuple[int, ...]] = {"state": (sizes.obs_steps, sizes.obs_dim)}
        shapes |= {"goal": (self.goal_dim,)} if self.goal_dim else {}
        shapes |= {camera: (sizes.obs_steps, *shape) for camera, shape in self.images.items()}
        named = [f"'{name}' (B, {', '.join(map(str, shape))})" for name, shape in shapes.items()]
        return f"the policy needs {'an array or ' if len(named) == 1 else ''}a mapping of {', '.join(named)}"

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        """Encode physical observations: `state` (B, To, Do), and what else the encoder reads.

        `generator` drives image augmentation during training; without it there is none. The train/eval mode
        of the module has no effect.
        """
        return self._with_goal_free(self.encoder(obs, self.normalizer, generator))

    def condition(self, vec: Tensor) -> Cond:
        """Return the condition of features (B, C), as `encode` returned it.

        Raises:
            CapabilityError: If the features are not the whole condition.
        """
        if self.encoder.token_dim:
            raise CapabilityError(
                "the features of this policy are not its whole condition: encoder.tokens adds the patches of "
                "its images. Clone one with encoder.tokens=false and a backbone without attention on tokens."
            )
        return self._with_goal_free(Cond(vec))

    def _with_goal_free(self, cond: Cond) -> Cond:
        """Add the condition with zeros as goal, if the policy is trained for it; the goal comes last."""
        if not self.config.goal_dropout:
            return cond
        without_goal = nn.functional.pad(cond.vec[:, : -self.goal_dim], (0, self.goal_dim))
        return replace(cond, free=replace(cond, vec=without_goal))

    def _check_guidance(self) -> None:
        """Refuse guidance without goals or without training by `goal_dropout`."""
        dropout, guidance = self.config.goal_dropout, self.config.guidance
        if guidance != 1 and not dropout:
            raise ConfigError(
                f"policy.guidance={guidance} needs a policy trained with policy.goal_dropout > 0; got 0."
            )
        if dropout and not (self.goal_dim and self.can_drop_goals):
            lacks = (
                "this policy has no goal" if self.can_drop_goals else f"{type(self).__name__} has no field"
            )
            raise ConfigError(f"policy.goal_dropout={dropout} needs a goal and a denoising process; {lacks}.")

    def normalize_action(self, action: Tensor) -> Tensor:
        """Physical -> normalised; (..., Da)."""
        return self.normalizer.encode("action", action)

    def physical(self, chunk: Tensor) -> Tensor:
        """Normalised -> physical; (..., Da)."""
        return self.normalizer.decode("action", chunk)

    def executed(self, chunk: Tensor) -> Tensor:
        """Return the rows of a normalised chunk (B, Th, Da) that are executed, physical, (B, Ta, Da)."""
        return self.physical(chunk[:, self.chunk.executed])

    @torch.no_grad()
    def act(self, obs: Any, *, noise: Tensor | None = None, generator: Rng = None) -> Tensor:
        """Choose actions: observations (B, To, Do) in physical units -> actions (B, Ta, Da), physical.

        Args:
            obs: Tensor, array, or mapping with `state`, `goal` for goal-conditioned policies, and images by
                camera name, (B, To, H, W, 3), uint8 or float in [0, 1].
            noise: (B, *noise_shape); makes the call deterministic.
            generator: Source of the noise when none is given.

        Raises:
            ConfigError: If an observation is of the wrong kind or, on the CPU, not finite.
        """
        tensors = self.observation(obs)
        require_finite(tensors)
        if noise is None:
            noise = self.sample_noise(len(tensors["state"]), generator=generator)
        noise = noise.to(self._like)
        if self.device.type == "cuda":
            return self._replayed(tensors, noise)
        if len(noise) <= _CPU_ROWS:
            return self.executed(self.plan(tensors, noise))
        blocks = zip(*(part.split(_CPU_ROWS) for part in (noise, *tensors.values())), strict=True)
        plans = [self.plan(dict(zip(tensors, parts, strict=True)), draw) for draw, *parts in blocks]
        return self.executed(torch.cat(plans))

    def _replayed(self, obs: Observation, noise: Tensor) -> Tensor:
        """Return the actions of `act` by recorded kernels, as long as the weights stay where they are."""
        state = tuple(weight.data_ptr() for weight in self.parameters()), self.training
        entry = _RECORDED.get(self)
        if entry is None or entry[0] != state:
            view = self._view()  # a reference to this module, the key, would keep the entry alive
            entry = state, Recorded(lambda obs, noise: view.executed(view.plan(obs, noise)))
            _RECORDED[self] = entry
        return entry[1](obs, noise).clone()  # the next replay overwrites its output

    def plan(self, obs: Observation, noise: Tensor) -> Tensor:
        """Return the chunk (B, Th, Da), normalised, of physical observations and noise."""
        return self.decode(self.encode(obs), noise)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.chunk.shape

    def sample_noise(self, n: int, *, generator: Rng = None) -> Tensor:
        return self._randn((n, *self.noise_shape), generator)

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        raise CapabilityError(f"{type(self).__name__} cannot decode noise.")

    def clone(self) -> Self:
        return copy.deepcopy(self)

    def _view(self) -> Self:
        """Return a shallow copy that shares networks and weights; assigned attributes are its own."""
        view = copy.copy(self)
        view.__dict__.update({name: self.__dict__[name].copy() for name in _REGISTERED})
        return view

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)
        forget(self)  # cached values have the old device and dtype
        return moved

    def with_act_steps(self, act_steps: int) -> Self:
        """Return a view that executes `act_steps` rows of each chunk."""
        view = self._view()
        view.config = replace(self.config, act_steps=act_steps)
        view.chunk = replace(self.chunk, act_steps=act_steps)
        return view

    def without_provenance(self) -> Self:
        """Return a view without recorded origin, for a policy derived by training."""
        view = self._view()
        view.provenance = {}
        return view

    def on_cpu(self) -> Self:
        """Return the policy itself on the CPU, else a CPU copy; worker processes compute on the CPU."""
        return self if self.device.type == "cpu" else self.clone().cpu()

    def _randn(self, shape: tuple[int, ...], generator: Rng) -> Tensor:
        like = self._like  # draws are made where the generator is, and moved
        device = like.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)

    def _rand(self, n: int, generator: Rng) -> Tensor:
        device = self.device if generator is None else generator.device
        return torch.rand(n, generator=generator, device=device).to(self.device)


def reduce_elements(x: Tensor, how: Reduction) -> Tensor:
    """Reduce (B, Th, Da) as named: `none`, `step` (B, Th), `sample` (B,) or `mean` (scalar)."""
    match how:
        case "none":
            return x
        case "step":
            return x.mean(dim=-1)
        case "sample":
            return x.mean(dim=(-2, -1))
        case "mean":
            return x.mean()
    raise ConfigError(f"reduce must be none, step, sample or mean; got '{how}'.")
