"""What a visitor sets on the page, the policy that results, and the text that reproduces it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from burnish.runs.locate import Located
from envs.evaluation.protocol import with_steps
from envs.fit import task_text
from envs.spec import EnvConfig
from envs.tasks.plane import Plane
from policies import registry
from policies.bounds import Checked, bounded
from policies.composition.compose import compose
from policies.denoising import DenoisingPolicy
from policies.errors import BurnishError, CapabilityError, ConfigError
from policies.policy import Policy
from policies.policy_config import ChunkSpec
from policies.samplers.step_table import StepRules
from policies.storage.strict_json import check_types
from policies.wrappers.sketch_guidance import SketchedPolicy
from policies.wrappers.sketch_settings import STRATEGIES, SketchSettings

MOST_PLANS, MOST_POINTS, MOST_STEPS = 64, 256, 128
START_SEED = 0  # of the first of the compared starts
STARTS = 20  # compared on request
SKETCH_FILE = "way.json"  # in the commands


class Strength(NamedTuple):
    """The key of `steer` by which a strategy follows more or less, and its slider."""

    key: str
    low: float
    high: float
    step: float
    default: float


def strengths(chunk: ChunkSpec) -> dict[str, Strength]:
    """Return the slider of every strategy that has one, for chunks of this size."""
    half = (chunk.act_steps + 1) // 2
    guided, stochastic = (STRATEGIES[name].scale for name in ("guided_diffusion", "stochastic_sampling"))
    ranked = STRATEGIES["post_hoc_ranking"].candidates
    return {
        "output_perturbation": Strength("guide_rows", 1, chunk.act_steps, 1, half),
        "post_hoc_ranking": Strength("candidates", 1, 64, 1, ranked),
        "biased_initialization": Strength("start", 0, 0.95, 0.01, SketchSettings.start),
        "guided_diffusion": Strength("scale", 0, 4 * guided, 1, guided),
        "stochastic_sampling": Strength("scale", 0, 4 * stochastic, 1, stochastic),
    }


@dataclass(frozen=True)
class Controls(Checked):
    """The settings of a visitor."""

    key = "controls"

    strategy: str = bounded("off", choices=("off", *STRATEGIES))
    strength: float | None = None  # value of the strategy's slider; None: its default
    sketch: tuple[tuple[float, float], ...] = ()  # the drawn line [m]
    sampler: str | None = None  # registered name; None: the policy's own
    steps: int | None = bounded(None, ge=1, le=MOST_STEPS)  # denoising steps; None: the sampler's own
    noise: float = bounded(1.0, ge=0, le=3)  # factor of all noise that a plan is made of
    plans: int = bounded(16, ge=1, le=MOST_PLANS)  # from one state; the first one is executed
    weight: float = bounded(0.5, ge=0, le=1)  # of the first of two composed policies
    film: bool = False  # whether to show the denoising steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sketch", len(self.sketch) <= MOST_POINTS, f"at most {MOST_POINTS} points")

    @classmethod
    def read(cls, values: Any) -> Controls:
        """Return the controls of a message; anything but known fields of their types is a ConfigError."""
        known = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ConfigError(f"controls must be an object with keys of {sorted(known)}.")
        check_types(cls, values, cls.key)
        points = values.get("sketch", [])
        return cls(**(values | {"sketch": tuple((float(x), float(y)) for x, y in points)}))

    @property
    def is_steered(self) -> bool:
        return self.strategy != "off" and len(set(self.sketch)) > 1


@dataclass(frozen=True)
class Subject:
    """The policy of the laboratory, or two that are composed, and its task.

    `found` and `members` are places and policies, the lead first.
    """

    found: tuple[Located, ...]
    members: tuple[Policy, ...]
    env: EnvConfig
    names_task: bool = True  # whether commands must name the task

    @cached_property
    def base(self) -> Any:
        """The policy as it is; two are composed in equal parts."""
        return compose(self.members, (0.5, 0.5)) if self.is_composed else self.members[0]

    @property
    def is_composed(self) -> bool:
        return len(self.members) > 1

    @cached_property
    def samplers(self) -> dict[str, Any]:
        """The samplers that the policy accepts and hooks can follow, by name; empty if it has none."""
        found: dict[str, Any] = {}
        if not isinstance(self.base, DenoisingPolicy):
            return found
        own = self.base.sampler
        for name, kind in registry.parts("sampler").items():
            if issubclass(kind, StepRules):
                with suppress(BurnishError):  # a sampler that the policy refuses is not offered
                    part = own if type(own) is kind else kind()
                    self.base.with_sampler(part)
                    found[name] = part
        return found

    def view(self, controls: Controls, plane: Plane | None) -> Any:
        """Return the policy with these controls.

        Raises:
            ConfigError: If a value does not fit the policy, or the sampler does not take as many steps.
            CapabilityError: If policy or task have no such control.
        """
        policy = self.plain(controls)
        if not controls.is_steered:
            return policy
        return SketchedPolicy(policy, _sketch(controls, plane), self.steering(controls))

    def plain(self, controls: Controls) -> Any:
        """Return the policy with all controls but steering."""
        policy = self.base
        if self.is_composed:
            policy = policy.with_weights(*weights(controls))
        part = self._sampler(controls)
        return with_steps(policy, controls.steps) if part is None else policy.with_sampler(part)

    def _sampler(self, controls: Controls) -> Any:
        """Return the chosen sampler with the chosen steps; None: the policy's own."""
        if controls.sampler is None:
            return None
        if controls.sampler not in self.samplers:
            raise CapabilityError(f"sampler must be one of {list(self.samplers)}; got '{controls.sampler}'.")
        part = self.samplers[controls.sampler]
        return part if controls.steps is None else replace(part, steps=controls.steps)

    def steering(self, controls: Controls) -> SketchSettings:
        """Return the settings of the chosen strategy (ConfigError: the strength is beyond its slider)."""
        slider = strengths(self.base.chunk).get(controls.strategy)
        if slider is None or controls.strength is None:
            return SketchSettings(controls.strategy)
        if not slider.low <= controls.strength <= slider.high:
            raise ConfigError(
                f"strength ({slider.key}) must be within {slider.low:g} and {slider.high:g}; "
                f"got {controls.strength:g}."
            )
        value: Any = (
            int(controls.strength) if slider.key in ("guide_rows", "candidates") else controls.strength
        )
        return SketchSettings(controls.strategy, **{slider.key: value})

    # -- text that reproduces what is shown -----------------------------------------------------------

    def command(self, controls: Controls, plane: Plane | None) -> str:
        """Return the shell command that plays the compared starts with these controls.

        A comment says what the command line has no key for.
        """
        lacks = []
        if controls.sampler is not None and not self.is_composed:
            lacks.append("another sampler of one policy")
        if controls.noise not in (0.0, 1.0) or (controls.noise == 0 and controls.is_steered):
            lacks.append(f"noise x {controls.noise:g}")
        if lacks:
            return f"# burnish eval has no key for {' and '.join(lacks)}: see Python"
        lines = []
        if controls.is_steered:
            content = json.dumps(_changed(_sketch(controls, plane)))
            lines.append(f"echo {shlex.quote(content)} > {SKETCH_FILE}")
        return "\n".join([*lines, " ".join(["burnish eval", *self._words(controls)])])

    def _words(self, controls: Controls) -> Iterator[str]:
        places = [shlex.quote(str(one.path if one.run is None else one.run)) for one in self.found]
        if self.is_composed:
            yield f"compose=[{','.join(places)}]"
            yield f"weights=[{','.join(f'{one:g}' for one in weights(controls))}]"
            if controls.sampler is not None:
                yield f"sampler={controls.sampler}"
        else:
            yield f"policy={places[0]}"
        if self.names_task:
            yield task_text(self.env)
        if controls.steps is not None:
            yield f"steps={controls.steps}"
        if controls.noise == 0:
            yield "start_noise=zero sampling_noise=zero"
        if controls.is_steered:
            steering = self.steering(controls)
            yield " ".join(f"steer.{key}={value}" for key, value in _changed(steering).items())
            yield f"steer.sketch={SKETCH_FILE}"
        yield f"first_seed={START_SEED} episodes={STARTS}"

    def python(self, controls: Controls, plane: Plane | None, obs: Mapping[str, Any], noise_seed: int) -> str:
        """Return Python lines whose `plans` (N, Th, Da) are the physical plans that are shown.

        A comment instead where the observation holds images.
        """
        if images := [name for name, value in obs.items() if not value.is_floating_point()]:
            return f"# the observation holds images ({', '.join(images)}), which are not written out"
        places = [f"burnish.load_policy({str(one.path)!r})" for one in self.found]
        names, lines = {"import burnish", "import torch"}, []
        if self.is_composed:
            names.add("from policies.composition.compose import compose")
            shares = ", ".join(f"{one:g}" for one in weights(controls))
            lines.append(f"policy = compose([{', '.join(places)}], [{shares}])")
        else:
            lines.append(f"policy = {places[0]}")
        sampler = self._sampler(controls)
        if sampler is None and controls.steps is not None:
            sampler = replace(self.base.sampler, steps=controls.steps)
        if sampler is not None:
            names.add(_import(sampler))
            lines.append(f"policy = policy.with_sampler({_call(sampler)})")
        if controls.is_steered:
            sketch, steering = _sketch(controls, plane), self.steering(controls)
            names |= {_import(sketch), _import(steering)}
            names.add("from policies.wrappers.sketch_guidance import SketchedPolicy")
            lines.append(f"sketch = {_call(sketch)}")
            lines.append(f"policy = SketchedPolicy(policy, sketch, {_call(steering)})")
        seen = ", ".join(f'"{name}": torch.tensor({value.tolist()})' for name, value in obs.items())
        lines += [
            f"obs = {{{seen}}}",
            f"obs = {{name: one.expand({controls.plans}, *one.shape[1:]) for name, one in obs.items()}}",
            f"generator = torch.Generator().manual_seed({noise_seed})",
            f"noise = {controls.noise:g} * policy.sample_noise({controls.plans}, generator=generator)",
            "with torch.inference_mode():",
            "    plans = policy.physical(policy.plan(obs, noise))",
        ]
        return "\n".join([*sorted(names, key=lambda line: (line.startswith("from"), line)), "", *lines])


def _sketch(controls: Controls, plane: Plane | None) -> Any:
    if plane is None:
        raise CapabilityError("a line can be drawn where the task is seen from above.")
    return plane.sketch(controls.sketch)


def weights(controls: Controls) -> tuple[float, float]:
    """Return the weights of two composed policies."""
    return controls.weight, round(1 - controls.weight, 6)


def _changed(part: Any) -> dict[str, Any]:
    return {
        one.name: value
        for one in fields(part)
        if (value := getattr(part, one.name)) != one.default or one.default is MISSING
    }


def _call(part: Any) -> str:
    """Return the expression that makes a dataclass, without what is default."""
    assert is_dataclass(part)
    given = ", ".join(f"{name}={value!r}" for name, value in _changed(part).items())
    return f"{type(part).__name__}({given})"


def _import(part: Any) -> str:
    return f"from {type(part).__module__} import {type(part).__name__}"
