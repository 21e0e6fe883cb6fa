"""Policies of burnish in LeRobot, registered as `burnish`.

    lerobot-rollout --policy.path=for_lerobot --robot.type=so101_follower …

LeRobot imports distributions whose names begin with `lerobot_policy_` and finds `BurnishPolicy` and
`make_burnish_pre_post_processors` beside `BurnishConfig`, in this module. The processors change nothing:
normalisation is part of burnish's policies. Written for LeRobot 0.4.4 to 0.6.1.

Legend: B batch, To observation history, Ta executed steps, Th predicted horizon, Do and Da widths.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.optim.optimizers import AdamWConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from torch import Tensor, nn

from lerobot_policy_burnish.sources import (
    ACTION,
    OBSERVED,
    SINGLE_CAMERA,
    Source,
    features_of,
    inputs_of,
    open_source,
)
from policies.errors import CapabilityError, ConfigError
from policies.runner import History
from policies.storage.policy_folder import save_policy

INSIDE = "policy"
"""Folder of the policy or export inside a directory that `save_pretrained` writes."""


def _unchanged() -> dict[str, NormalizationMode]:
    return {kind: NormalizationMode.IDENTITY for kind in ("STATE", "ENV", "VISUAL", "ACTION")}


@PreTrainedConfig.register_subclass("burnish")
@dataclass
class BurnishConfig(PreTrainedConfig):
    """Where the policy is, and how it acts; horizons and features are read from it.

    Args:
        source: Policy directory, run, exported folder, or address of `burnish serve` (`tcp://…`).
        state_keys: Features of the state, in order.
        seed: Seed of the noise.
        timeout_s: Time that a server has for an answer [s].
        action_feature_names: The action's entries in order, keys of the robot; None: those of the policy.
        lr: Learning rate of AdamW where LeRobot trains the policy.
    """

    source: str = ""
    state_keys: list[str] = field(default_factory=lambda: [OBSERVED])
    seed: int = 0
    timeout_s: float = 1.0
    action_feature_names: list[str] | None = None
    n_action_steps: int = 1  # Ta
    horizon: int = 1  # Th
    action_start: int = 0  # frames between the first predicted action and the newest observation
    lr: float = 1e-4
    normalization_mapping: dict[str, NormalizationMode] = field(default_factory=_unchanged)

    @property
    def observation_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(-self.action_start, self.horizon - self.action_start))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(lr=self.lr, weight_decay=1e-6)

    def get_scheduler_preset(self) -> None:
        return None

    def validate_features(self) -> None:
        """Refuse a configuration without a policy."""
        if not self.source:
            raise ConfigError("policy.source must name a policy directory, an exported folder or tcp://….")

    def describe(self, source: Source) -> None:
        """Set horizons, features and names to those of a source; given names and features are kept."""
        schema = source.schema
        self.n_obs_steps, (self.n_action_steps, _) = schema.obs_steps, schema.action.shape
        chunk = None if source.policy is None else source.policy.chunk
        self.horizon = self.n_action_steps if chunk is None else chunk.horizon
        self.action_start = 0 if chunk is None else chunk.action_start
        if self.action_feature_names is None and source.action_names is not None:
            self.action_feature_names = list(source.action_names)
        found = features_of(schema, single_camera=SINGLE_CAMERA in (self.input_features or {}))
        features = {key: PolicyFeature(FeatureType[kind], shape) for key, (kind, shape) in found.items()}
        self.output_features = {ACTION: features.pop(ACTION)}
        if self.state_keys == [OBSERVED]:
            self.input_features = features


class BurnishPolicy(PreTrainedPolicy):
    """A policy of burnish behind LeRobot's interface.

    `select_action` is called once per control step: it keeps the last To observations and the rows of the
    current chunk. The noise of a decision depends on seed, episode and decision number, as for
    burnish's client of a server, so the actions are the same.

    Args:
        config: See `BurnishConfig`; completed from the policy.
        root: Folder that a relative `config.source` lies in.
        dataset_meta: LeRobot's dataset of the robot; its action names must be those of the policy.

    Raises:
        BurnishError: If there is no such policy, or the robot's actions are others or in another order.
    """

    config_class: ClassVar[type[BurnishConfig]] = BurnishConfig
    name: ClassVar[str] = "burnish"

    def __init__(
        self, config: BurnishConfig, *, root: str | Path | None = None, dataset_meta: Any = None, **_: Any
    ) -> None:
        config.validate_features()
        super().__init__(config)
        place = config.source
        if root is not None and "://" not in place and not Path(place).is_absolute():
            place = str(Path(root) / place)
        self._place = place
        self._source = open_source(place, device=config.device or "cpu", timeout_s=config.timeout_s)
        config.describe(self._source)
        self.policy: nn.Module | None = self._source.policy
        if dataset_meta is not None:
            _check_names(config.action_feature_names, dataset_meta.features[ACTION].get("names"))
        self._history = History(self._source.schema.obs_steps)
        self._chunk: deque[Tensor] = deque()
        self._episode, self._decisions = -1, 0  # the first reset begins episode 0

    def reset(self) -> None:
        """Start an episode: clears observations and chunk, and changes the noise."""
        self._history.reset()
        self._chunk.clear()
        self._episode, self._decisions = self._episode + 1, 0

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """Return the actions to execute (B, Ta, Da), physical and within the limits.

        Args:
            batch: Newest observations (B, ...), which join the history, or histories (B, To, ...).
        """
        if self._episode < 0:
            self.reset()
        inputs = self._inputs(batch)
        if inputs["observation"].ndim == 2:
            self._history.push(inputs)
            inputs = {name: np.moveaxis(value, 0, 1) for name, value in self._history.stacked().items()}
        key = (self.config.seed, self._episode, self._decisions)
        actions = self._source.decide(inputs, key)
        self._decisions += 1
        return torch.from_numpy(actions).to(self.config.device or "cpu")

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """Return the actions (B, Da) of this control step for observations (B, ...)."""
        if self._chunk:
            self._history.push(self._inputs(batch))
        else:
            self._chunk.extend(self.predict_action_chunk(batch).unbind(dim=1))
        return self._chunk.popleft()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        """Return the cloning loss of histories (B, To, ...) and actions (B, Th, Da); padding is masked."""
        policy = self._trained()
        inputs = self._inputs(batch)
        obs = {"state" if name == "observation" else name: value for name, value in inputs.items()}
        obs = {name: value if value.ndim > 2 else value[:, None] for name, value in obs.items()}
        action = policy.normalize_action(torch.as_tensor(batch[ACTION]).to(policy.device, policy.dtype))
        cond = policy.encode(policy.observation(obs))
        loss = policy.matching_loss(cond, action, policy.sample_te(len(action)), reduce="step")  # (B, Th)
        padded = batch.get(f"{ACTION}_is_pad", torch.zeros_like(loss, dtype=torch.bool)).to(loss.device)
        return (loss * ~padded).sum() / (~padded).sum(), None

    def get_optim_params(self) -> Iterator[nn.Parameter]:
        return self._trained().parameters()

    def _trained(self) -> Any:
        if self.policy is None or not hasattr(self.policy, "matching_loss"):
            raise CapabilityError(
                f"{self._place} cannot be trained; give a policy directory with a matching loss."
            )
        return self.policy

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
        return inputs_of(batch, self._source.schema, self.config.state_keys)

    def _save_pretrained(self, save_directory: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write configuration and policy; the directory of a served policy holds its address alone."""
        inside, given = Path(save_directory) / INSIDE, self.config.source
        if self._source.policy is not None:
            if state_dict is not None:
                self.load_state_dict(state_dict)
            save_policy(self._source.policy, inside)
        elif "://" not in self._place and Path(self._place).resolve() != inside.resolve():
            shutil.copytree(self._place, inside, dirs_exist_ok=True)
        self.config.source = given if "://" in self._place else INSIDE
        try:
            self.config._save_pretrained(Path(save_directory))
        finally:
            self.config.source = given

    @classmethod
    def from_pretrained(
        cls,
        pretrained_name_or_path: str | Path,
        *,
        config: PreTrainedConfig | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        **kwargs: Any,
    ) -> BurnishPolicy:
        """Load a directory that `save_pretrained` or `prepare` wrote, from the disk or the hub."""
        root = Path(pretrained_name_or_path)
        if not root.is_dir():
            from huggingface_hub import snapshot_download

            options = {"revision": revision, "cache_dir": cache_dir, "token": token}
            root = Path(snapshot_download(str(pretrained_name_or_path), **options))
        given = PreTrainedConfig.from_pretrained(root) if config is None else config
        return cls(given, root=root, **kwargs).eval()


def _check_names(ours: list[str] | None, theirs: Any) -> None:
    """Refuse a robot whose actions are others, or in another order, where both are known."""
    if ours is None or not isinstance(theirs, list) or list(ours) == theirs:
        return
    raise ConfigError(
        f"the policy's actions are {list(ours)}; the robot's are {theirs}. Their order must agree."
    )


def make_burnish_pre_post_processors(
    config: BurnishConfig, dataset_stats: Any = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Return pipelines that add the batch axis and move tensors, and change no number.

    The (un)normalising steps are identities: LeRobot's commands override steps by name, so they must exist.
    """
    features = {**(config.input_features or {}), **(config.output_features or {})}
    options = {"norm_map": config.normalization_mapping, "stats": dataset_stats}
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
        NormalizerProcessorStep(features=features, **options),
    ]
    after = [
        UnnormalizerProcessorStep(features=config.output_features or {}, **options),
        DeviceProcessorStep(device="cpu"),
    ]
    ways = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
    return (
        PolicyProcessorPipeline(steps=before, name="policy_preprocessor"),
        PolicyProcessorPipeline(steps=after, name="policy_postprocessor", **ways),
    )


def prepare(source: str, out: str | Path, **options: Any) -> Path:
    """Write the directory for `--policy.path`; `options` are those of `BurnishConfig`."""
    config = BurnishConfig(source=source, **{"device": "cpu", "push_to_hub": False, **options})
    policy = BurnishPolicy(config)
    policy.save_pretrained(out)
    for pipeline in make_burnish_pre_post_processors(config):
        pipeline.save_pretrained(out)
    return Path(out)
