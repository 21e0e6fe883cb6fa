import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import exit_code_of
from messages import mentions
from pairwise import of_each
from safetensors.torch import load_file, save_file
from small_policies import observations, small_policy

from algos.base import Setup
from burnish.runs.locate import locate
from policies import registry
from policies.backbones.switched import SwitchedField
from policies.composition.compose import compose
from policies.errors import CheckpointError, ConfigError, MissingExtraError
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.storage import atomic_write, policy_folder
from policies.storage.policy_folder import load_policy, save_policy


@pytest.mark.parametrize("clip", [None, 2.0, 5.0])
def test_the_clip_of_observations_is_saved_and_binds(clip: float | None, tmp_path: Path) -> None:
    loaded = load_policy(save_policy(small_policy(observation_clip=clip), tmp_path / "policy"))
    assert loaded.config.observation_clip == clip
    far = loaded.encode({"state": 1e4 * observations(4)}).vec.abs().max().item()
    assert far == clip if clip is not None else far > 100


def test_a_directory_that_says_nothing_of_a_clip_has_none(tmp_path: Path) -> None:
    path = save_policy(small_policy(observation_clip=2.0), tmp_path / "policy") / "config.json"
    description = json.loads(path.read_text())
    del description["observation_clip"]
    path.write_text(json.dumps(description))
    (path.parent / "SHA256SUMS").unlink()
    assert load_policy(tmp_path / "policy").config.observation_clip is None


def test_frozen_and_tuned_networks_travel_together(tmp_path: Path) -> None:
    policy = small_policy(VPDiffusion(num_levels=6))
    tuned = policy.clone().field
    with torch.no_grad():
        for p in tuned.parameters():
            p.add_(0.1)
    policy.field = SwitchedField(policy.field, tuned, 2.0)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    obs, noise = observations(3), policy.sample_noise(3)
    assert torch.equal(loaded.act(obs, noise=noise), policy.act(obs, noise=noise))


def test_saving_again_replaces_the_directory_and_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = small_policy(), small_policy(RectifiedFlow())
    save_policy(first, tmp_path / "policy")
    save_policy(second, tmp_path / "policy", provenance={"task": "avoid"})
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert type(load_policy(tmp_path / "policy").process) is RectifiedFlow
    assert "| task | avoid |" in (tmp_path / "policy" / "README.md").read_text()


def test_a_replacement_that_fails_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(small_policy(), tmp_path / "policy")
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if target.name == "policy" and ".old." not in source.name:
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        save_policy(small_policy(RectifiedFlow()), tmp_path / "policy")
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert type(load_policy(tmp_path / "policy").process) is VPDiffusion


def replaced_by_a_program_that_is_killed(folder: Path) -> int:
    """Save over a policy in another process, which is killed where something is renamed to this name."""
    rename = os.rename

    def killed_between(source: Path, target: Path) -> None:
        if Path(target).name == "policy":
            os._exit(9)
        rename(source, target)

    def program() -> None:
        os.rename = killed_between
        save_policy(small_policy(RectifiedFlow()), folder / "policy")

    save_policy(small_policy(), folder / "policy")
    return exit_code_of(program)


def test_a_kill_between_two_renames_leaves_the_earlier_policy_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    assert replaced_by_a_program_that_is_killed(tmp_path) == 9
    with pytest.raises(
        CheckpointError, match=r"killed while replacing it; rename .*\.policy\.old\."
    ) as refused:
        load_policy(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=mentions(".policy.old")):
        locate(tmp_path / "policy")
    beside = str(refused.value).split("rename ")[1].split(" to it")[0]
    assert type(load_policy(beside).process) is VPDiffusion


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges directories")
def test_an_exchange_leaves_no_moment_without_a_policy(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    if not atomic_write._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot")
    assert replaced_by_a_program_that_is_killed(tmp_path) == 0  # nothing was renamed to this name
    assert type(load_policy(tmp_path / "policy").process) is RectifiedFlow
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "policy"]


@pytest.mark.parametrize("read", ["read_config", "_load_weights"])
def test_what_is_replaced_while_it_is_read_is_read_again(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both policies have weights of the same names and shapes."""
    earlier, later = small_policy(act_steps=1), small_policy(act_steps=2)
    for own in later.parameters():
        own.data += 1.0
    target, original, left = tmp_path / "policy", getattr(policy_folder, read), [later]
    save_policy(earlier, target)

    def interrupted(*given: Any) -> Any:
        found = original(*given)
        if left:
            save_policy(left.pop(), target)
        return found

    monkeypatch.setattr(policy_folder, read, interrupted)
    loaded = load_policy(target)
    assert loaded.chunk.act_steps == 2
    for own, other in zip(loaded.parameters(), later.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_foreign_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match=mentions("exists policy")):
        save_policy(small_policy(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    (save_policy(small_policy(), tmp_path / "policy") / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=mentions("missing")):
        load_policy(tmp_path / "policy")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("field.trunk.inlet.bias", lambda value: value.fill_(float("nan")), "finite"),
        ("normalizer.state_offset", lambda value: value.fill_(float("inf")), "finite"),
        ("normalizer.action_scale", torch.zeros_like, "zeros"),
        ("normalizer.action_scale", lambda value: value.int(), "torch.float32 torch.int32"),
        ("normalizer.action_scale", lambda value: value.bool(), "torch.float32 torch.bool"),
        ("normalizer.action_offset", lambda value: value.double() + 1e300, "finite"),
    ],
)
def test_values_that_cannot_act_are_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    weights = save_policy(small_policy(), tmp_path / "policy") / "model.safetensors"
    state = load_file(weights)
    save_file(state | {name: change(state[name])}, weights)
    with pytest.raises(CheckpointError, match=mentions(f"{name} {message}")):
        load_policy(tmp_path / "policy")


# -- what is saved can be loaded --------------------------------------------------------------------------


def _combinations() -> list[tuple[str, str, int | None]]:
    found: list[tuple[str, str, int | None]] = []
    for process, kind in registry.parts("process").items():
        for sampler, choice in registry.parts("sampler").items():
            for steps in (None, 100):
                try:
                    (choice() if steps is None else choice(steps=steps)).table(kind())
                except (ConfigError, MissingExtraError, TypeError, AttributeError):
                    continue  # they do not belong together, or it has no such number
                found.append((process, sampler, steps))
    return found


LONG = [case for case in _combinations() if case[2]]  # the work of loading is limited
SHORT = [case for case in _combinations() if not case[2]]


@pytest.mark.parametrize(("process", "sampler", "steps"), [*LONG, *of_each(SHORT, lambda case: case)])
def test_every_process_loads_with_every_sampler(
    process: str, sampler: str, steps: int | None, tmp_path: Path
) -> None:
    choice = registry.lookup("sampler", sampler)
    policy = small_policy(
        registry.lookup("process", process)(), choice() if steps is None else choice(steps=steps)
    )
    assert load_policy(save_policy(policy, tmp_path / "policy")).sampler == policy.sampler


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.normalizer.get_buffer("action_scale").fill_(math.nan), "action_scale finite"),
        (lambda p: p.normalizer.get_buffer("action_scale").zero_(), "action_scale zeros"),
        (lambda p: setattr(p.config, "observation_clip", math.inf), "null"),
        (lambda p: p.double(), "normalizer.state_scale"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved_over_what_can(
    spoil: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    policy = small_policy(VPDiffusion(num_levels=5))
    save_policy(policy, tmp_path / "policy")
    broken = policy.clone()
    spoil(broken)
    with pytest.raises(CheckpointError, match=mentions(message)):
        save_policy(broken, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    obs, noise = observations(2), policy.sample_noise(2)
    assert torch.equal(load_policy(tmp_path / "policy").act(obs, noise=noise), policy.act(obs, noise=noise))
    with pytest.raises(CheckpointError, match=mentions("saved JSON")):
        save_policy(policy, tmp_path / "other", provenance={"success": math.nan})
    with pytest.raises(CheckpointError, match=mentions("object numbers, text, lists")):
        save_policy(policy, tmp_path / "other", provenance={"data": object()})
    assert not (tmp_path / "other").exists()


def test_a_link_stays_one_and_a_file_is_refused(tmp_path: Path) -> None:
    save_policy(small_policy(), tmp_path / "10")
    (tmp_path / "last").symlink_to("10")
    second = small_policy(RectifiedFlow())
    assert save_policy(second, tmp_path / "last") == tmp_path / "last"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "last"]
    assert (tmp_path / "last").is_symlink() and type(load_policy(tmp_path / "10").process) is RectifiedFlow
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CheckpointError, match=mentions("exists policy")):
        save_policy(second, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_where_a_policy_comes_from_is_saved_again(tmp_path: Path) -> None:
    facts = {"algo": "bc", "env": {"name": "avoid"}}
    policy = load_policy(save_policy(small_policy(), tmp_path / "first", provenance=facts))
    for name, one in {"same": policy, "copy": policy.clone(), "view": policy.with_act_steps(1)}.items():
        save_policy(one, tmp_path / name)
        assert policy_folder.read_config(tmp_path / name)["provenance"] == facts
    save_policy(policy, tmp_path / "other", provenance={"algo": "dppo"})
    assert policy_folder.read_config(tmp_path / "other")["provenance"] == {"algo": "dppo"}


def test_what_is_trained_or_made_from_a_policy_does_not_come_from_where_it_does(tmp_path: Path) -> None:
    facts = {"env": {"name": "avoid"}}
    policy = load_policy(save_policy(small_policy(RectifiedFlow()), tmp_path / "policy", provenance=facts))
    init = Setup(init=policy).init
    assert init is not None and not init.clone().provenance and policy.provenance == facts
    assert next(init.parameters()) is next(policy.parameters())
    assert not compose([policy, policy], [0.5, 0.5]).provenance and not small_policy().provenance
