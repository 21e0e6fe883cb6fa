"""Weights of other programs: imported whole and equal, or refused with the reason; no code of a file runs."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_checkpoints import (
    EXAMPLES,
    TOLERANCE,
    Example,
    diffusion_policy,
    dppo,
    example,
    pretrained,
    reinflow,
    shaken,
    under,
    workspace,
    write,
)
from messages import mentions
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from policies.backbones.switched import SwitchedField
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.diffusion_policy import DiffusionPolicySource
from policies.importing.dppo import DppoSource
from policies.importing.importing import Conversion, import_policy
from policies.importing.reinflow import ReinflowSource
from policies.protocols import Cond
from policies.samplers.ddpm import DDIM
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, read_config, save_policy


def imported(of: Example, folder: Path, **options: Any) -> tuple[DenoisingPolicy, Conversion]:
    policy, conversion = import_policy(**(write(of, folder) | options))
    assert isinstance(policy, DenoisingPolicy)
    return policy, conversion


def predicted(policy: DenoisingPolicy, of: Example) -> Tensor:
    with torch.no_grad():
        return policy.field(of.x, of.time.float(), Cond(of.obs.flatten(1)), second_time=of.length)


@pytest.fixture
def cloned() -> Example:
    return dppo("dppo_net_mlp_res_relu")


# -- what is imported -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_loaded_import_predicts_what_the_released_network_predicts(name: str, tmp_path: Path) -> None:
    of = example(name)
    policy, _ = imported(of, tmp_path)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, DenoisingPolicy)
    torch.testing.assert_close(predicted(loaded, of), of.out, **TOLERANCE)
    assert loaded.chunk.obs_steps == of.obs.shape[1]


@pytest.mark.parametrize("name", ["dp_unet1d_film", "dp_transformer"])
def test_the_normaliser_of_diffusion_policy_comes_along(name: str, tmp_path: Path) -> None:
    of = example(name)
    policy, conversion = imported(of, tmp_path)
    (scale, offset), (act_scale, act_offset) = of.maps["obs"], of.maps["action"]
    torch.testing.assert_close(policy.encode({"state": of.obs}).vec, (scale * of.obs + offset).flatten(1))
    torch.testing.assert_close(policy.physical(of.x), (of.x - act_offset) / act_scale)
    assert conversion.normalizer == {"state": "checkpoint", "action": "checkpoint"}


@pytest.mark.parametrize("name", ["dppo_net_mlp_res_relu", "reinflow_reflow_loss"])
def test_the_statistics_of_dppo_and_reinflow_come_along(name: str, tmp_path: Path) -> None:
    of = example(name)
    policy, conversion = imported(of, tmp_path)
    limits = {key: torch.from_numpy(value) for key, value in of.limits().items()}
    span = limits["obs_max"] - limits["obs_min"] + 1e-6
    normal = 2 * ((of.obs - limits["obs_min"]) / span - 0.5)
    torch.testing.assert_close(policy.encode({"state": of.obs}).vec, normal.flatten(1).float())
    physical = (of.x + 1) / 2 * (limits["action_max"] - limits["action_min"]) + limits["action_min"]
    torch.testing.assert_close(policy.physical(of.x), physical.float())
    assert conversion.normalizer == {"state": "file of statistics", "action": "file of statistics"}


def test_an_action_that_never_moved_keeps_its_value(cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    limits = cloned.limits()
    limits["action_max"][1] = limits["action_min"][1]
    np.savez(tmp_path / "normalization.npz", **limits)
    policy, _ = import_policy(**arguments)
    still = policy.physical(torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]))[:, 1]
    torch.testing.assert_close(still, torch.full((2,), float(limits["action_min"][1])))


def test_observations_are_not_clipped(cloned: Example, tmp_path: Path) -> None:
    policy, _ = imported(cloned, tmp_path)
    assert policy.encode({"state": 1e4 + cloned.obs}).vec.abs().max() > 1e3


def test_averaged_weights_are_preferred_and_others_can_be_chosen(cloned: Example, tmp_path: Path) -> None:
    averaged, conversion = imported(cloned, tmp_path)
    raw, other = imported(cloned, tmp_path, entry="model")
    assert (conversion.entry, other.entry) == ("ema", "model")
    assert not torch.equal(predicted(averaged, cloned), predicted(raw, cloned))
    with pytest.raises(CheckpointError, match=mentions("emma ema model")):
        imported(cloned, tmp_path, entry="emma")


def test_the_averaged_weights_of_a_workspace_are_preferred(tmp_path: Path) -> None:
    _, conversion = imported(diffusion_policy("dp_unet1d_film"), tmp_path)
    assert conversion.entry == "state_dicts/ema_model"


@pytest.mark.parametrize("prefix", ["", "network."])
def test_a_safetensors_file_is_read(prefix: str, cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    path = tmp_path / "flat.safetensors"
    save_file(under(prefix, cloned.weights), path)
    policy, conversion = import_policy(**(arguments | {"path": path}))
    torch.testing.assert_close(predicted(policy, cloned), cloned.out, **TOLERANCE)
    assert conversion.entry == ""


def test_the_old_format_of_torch_and_half_precision_are_read(cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    halves = {name: value.bfloat16() for name, value in cloned.weights.items()}
    torch.save({"model": halves}, arguments["path"], _use_new_zipfile_serialization=False)
    policy, _ = import_policy(**arguments)
    assert policy.dtype == torch.float32
    torch.testing.assert_close(predicted(policy, cloned), cloned.out, rtol=0.1, atol=0.1)


def finetuned(of: Example) -> dict[str, Any]:
    """Return a checkpoint of DPPO's fine-tuning: the frozen network twice, the tuned one, the critic."""
    frozen = under("network.", of.weights) | under("actor.", of.weights)
    critic = {"critic.Q1.layers.0.weight": torch.zeros(4, 11)}
    return {"itr": 7, "model": frozen | under("actor_ft.", shaken(of.weights)) | critic}


def test_frozen_and_tuned_networks_of_dppo_become_one_field(cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    torch.save(finetuned(cloned), arguments["path"])
    arguments["source"] = replace(cloned.source, num_levels=20, tuned_steps=10)
    policy, conversion = import_policy(**arguments)
    policy = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(policy.field, SwitchedField)
    of_step = policy.field(cloned.x, torch.full((5,), 10.0), Cond(cloned.obs.flatten(1)))
    base = policy.field.base(cloned.x, torch.full((5,), 10.0), Cond(cloned.obs.flatten(1)))
    tuned = policy.field.tuned(cloned.x, torch.full((5,), 9.0), Cond(cloned.obs.flatten(1)))
    assert torch.equal(of_step, base)
    assert torch.equal(policy.field(cloned.x, torch.full((5,), 9.0), Cond(cloned.obs.flatten(1))), tuned)
    torch.testing.assert_close(
        policy.field.base(cloned.x, cloned.time.float(), Cond(cloned.obs.flatten(1))), cloned.out, **TOLERANCE
    )
    assert conversion.tensors == 2 * len(cloned.weights)
    assert conversion.skipped == {
        "the critic": 1, "the frozen network under its other name": len(cloned.weights)
    }  # fmt: skip


def test_a_network_that_no_step_uses_is_left_out(cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    torch.save(finetuned(cloned), arguments["path"])
    source = replace(cloned.source, num_levels=10, tuned_steps=5)
    policy, conversion = import_policy(**(arguments | {"source": source}), sampler=DDIM(steps=5))
    assert not isinstance(policy.field, SwitchedField)
    assert conversion.skipped["the frozen network"] == conversion.tensors == len(cloned.weights)


@pytest.mark.parametrize("steps", [None, 0, 21])
def test_a_tuned_checkpoint_asks_how_many_steps_were_tuned(
    steps: int | None, cloned: Example, tmp_path: Path
) -> None:
    arguments = write(cloned, tmp_path)
    torch.save(finetuned(cloned), arguments["path"])
    arguments["source"] = replace(cloned.source, tuned_steps=steps)
    with pytest.raises(ConfigError, match=mentions("source.tuned_steps")):
        import_policy(**arguments)


@pytest.mark.parametrize("whole", [True, False])
def test_a_tuned_reinflow_is_the_velocity_network_alone(whole: bool, tmp_path: Path) -> None:
    of = reinflow("reinflow_reflow_loss")
    arguments = write(of, tmp_path)
    noise = {"actor_ft.explore_noise_net.mlp_logvar.moduleList.0.linear_1.weight": torch.zeros(2, 2)}
    model = under("actor_ft.policy.", of.weights) | under("actor_old.", shaken(of.weights)) | noise
    kept = {"model": model} if whole else {"model": model, "policy": under("network.", of.weights)}
    torch.save({"itr": 7, **kept}, arguments["path"])
    policy, conversion = import_policy(**arguments)
    torch.testing.assert_close(predicted(policy, of), of.out, **TOLERANCE)
    assert conversion.entry == ("model" if whole else "policy")
    assert bool(conversion.skipped) == whole


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "sample"),
    [("reinflow_reflow_loss", "sample_leftgrid"), ("reinflow_shortcut_loss", "sample_official")],
)
def test_an_imported_flow_gives_the_actions_of_equal_steps(
    name: str, sample: str, steps: int, tmp_path: Path
) -> None:
    of = example(name)
    policy, _ = imported(of, tmp_path, source=replace(of.source, steps=steps))
    chunk = policy.decode(Cond(of.obs.flatten(1)), of.extras["z"])
    torch.testing.assert_close(chunk, of.extras[f"{sample}_K{steps}_clip0"], **TOLERANCE)


def test_an_imported_shortcut_can_be_trained_further(tmp_path: Path) -> None:
    of = example("reinflow_shortcut_loss")
    policy, _ = imported(of, tmp_path)
    te = policy.sample_te(len(of.x), generator=torch.Generator().manual_seed(0))
    policy.matching_loss(Cond(of.obs.flatten(1)), of.x, te).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


def test_a_shortcut_is_told_from_a_rectified_flow(tmp_path: Path) -> None:
    of = example("reinflow_shortcut_loss")
    with pytest.raises(CapabilityError, match=mentions("source=reinflow_shortcut")):
        imported(of, tmp_path, source=ReinflowSource(activation="relu"))
    with pytest.raises(CheckpointError, match=mentions("ShortCutFlowMLP")):
        imported(example("reinflow_reflow_loss"), tmp_path, source=of.source)
    name = "vel_head.layers.0.weight"
    of.weights[name] = torch.nn.functional.pad(of.weights[name], (0, 16))  # times and condition side by side
    with pytest.raises(CapabilityError, match=mentions("embed_combination_type")):
        imported(of, tmp_path)


@pytest.mark.parametrize("name", ["reinflow_reflow_loss", "reinflow_shortcut_loss"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("bound", [None, 1.0])
def test_an_imported_flow_can_be_evaluated_as_released(
    name: str, steps: int, bound: float | None, tmp_path: Path
) -> None:
    of = example(name)
    sampler = Euler(steps=steps, released_times=name == "reinflow_reflow_loss", clip_state=bound)
    policy, _ = imported(of, tmp_path, sampler=sampler)
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert isinstance(loaded, DenoisingPolicy)
    chunk = loaded.decode(Cond(of.obs.flatten(1)), of.extras["z"])
    expected = of.extras[f"sample_official_K{steps}_clip{int(bound is not None)}"]
    torch.testing.assert_close(chunk, expected, **TOLERANCE)


def test_executed_rows_begin_at_the_newest_observation_of_diffusion_policy_only(tmp_path: Path) -> None:
    theirs, _ = imported(diffusion_policy("dp_unet1d_film"), tmp_path)
    assert theirs.chunk.executed == slice(1, 8)
    of = diffusion_policy("dp_unet1d_film")
    shorter, _ = imported(of, tmp_path, source=replace(of.source, act_steps=3))
    assert shorter.chunk.executed == slice(1, 4)


def test_the_provenance_of_a_directory_tells_where_it_is_from(cloned: Example, tmp_path: Path) -> None:
    policy, conversion = imported(cloned, tmp_path)
    folder = save_policy(policy, tmp_path / "policy", provenance=conversion.facts())
    facts = read_config(folder)["provenance"]
    assert facts["imported"] == "state_3.pt" and len(facts["imported_sha256"]) == 64
    assert facts["imported_entry"] == "ema" and facts["imported_tensors"] == len(cloned.weights)
    assert facts["imported_source"]["name"] == "dppo" and facts["imported_source"]["num_levels"] == 20
    assert str(tmp_path) not in (folder / "config.json").read_text()


# -- what is refused ------------------------------------------------------------------------------------


class Intruder:
    """Unpickled, it would make a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("how", ["zip", "old", "bare"])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".pth"])
def test_a_file_that_would_run_code_is_refused_and_does_not(
    how: str, suffix: str, cloned: Example, tmp_path: Path
) -> None:
    path, trace = tmp_path / f"evil{suffix}", tmp_path / "trace"
    payload = pretrained(cloned) | {"cfg": Intruder(trace)}
    if how == "bare":
        path.write_bytes(pickle.dumps(payload["cfg"], protocol=2))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError, match=mentions("posix.mkdir")):
        import_policy(path, cloned.source, identity=["state", "action"])
    assert not trace.exists()
    with pytest.raises(CheckpointError):
        import_policy(path.rename(tmp_path / "evil.safetensors"), cloned.source)
    assert not trace.exists()


def test_a_workspace_with_its_configuration_tells_how_to_convert_it(tmp_path: Path) -> None:
    of = diffusion_policy("dp_unet1d_film")
    arguments = write(of, tmp_path)
    torch.save(workspace(of) | {"cfg": OmegaConf.create({"horizon": 8})}, arguments["path"])
    with pytest.raises(CheckpointError, match=mentions("omegaconf")) as caught:
        import_policy(**arguments)
    command = re.search(r'python -c "(.*)"', str(caught.value))
    assert command is not None
    code = command[1].replace("import dill, torch", "import pickle as dill, torch")  # dill is not installed
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        exec(code)
    finally:
        os.chdir(here)
    policy, _ = import_policy(tmp_path / "state_3.safetensors", of.source)
    torch.testing.assert_close(predicted(policy, of), of.out, **TOLERANCE)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_a_truncated_file_is_damaged(kind: str, share: float, cloned: Example, tmp_path: Path) -> None:
    path = tmp_path / ("whole.safetensors" if kind == "safetensors" else "whole.pt")
    if kind == "safetensors":
        save_file(cloned.weights, path)
    else:
        torch.save(pretrained(cloned), path, _use_new_zipfile_serialization=kind == "zip")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=mentions("read")) as caught:
        import_policy(path, cloned.source, identity=["state", "action"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.pt", "."])
def test_a_missing_file_is_named(name: str, cloned: Example, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("weights=")):
        import_policy(tmp_path / name, cloned.source)


Change = Callable[[dict[str, Tensor]], Any]
OUTLET = "mlp_mean.layers.2.bias"

CHANGES: dict[str, tuple[Change, type[Exception], str]] = {
    "missing": (
        lambda weights: weights.pop(OUTLET), CheckpointError, f"missing {OUTLET}",
    ),
    "needed to know the sizes": (
        lambda weights: weights.pop("time_embedding.1.weight"),
        CheckpointError,
        "time_embedding.1.weight",
    ),
    "unexpected": (
        lambda weights: weights.update({"critic.weight": torch.zeros(2)}),
        CheckpointError,
        "critic.weight",
    ),
    "another shape": (
        lambda weights: weights.update({OUTLET: torch.zeros(5)}),
        CheckpointError,
        f"{OUTLET} (12,) (5,)",
    ),
    "another number of dimensions": (
        lambda weights: weights.update({"time_embedding.1.weight": torch.zeros(5)}),
        CheckpointError,
        "time_embedding.1.weight 2",
    ),
    "not finite": (
        lambda weights: weights[OUTLET].fill_(torch.nan), CheckpointError, f"{OUTLET} finite",
    ),
    "no floats": (
        lambda weights: weights.update({OUTLET: torch.zeros(12, dtype=torch.long)}),
        CheckpointError,
        f"{OUTLET} torch.float32 torch.int64",
    ),
    "of images": (
        lambda weights: weights.update({"backbone.vit.weight": torch.zeros(2)}),
        CapabilityError,
        "encoder images",
    ),
    "nothing known": (
        lambda weights: [weights.pop(name) for name in list(weights) if name.startswith("mlp")],
        CheckpointError,
        "MLP time_embedding.1.bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_do_not_fit_are_named(change: str, cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    apply, error, message = CHANGES[change]
    apply(cloned.weights)
    torch.save(pretrained(cloned), arguments["path"])
    with pytest.raises(error, match=mentions(message)):
        import_policy(**arguments)


def test_what_no_tensor_tells_is_asked_for(cloned: Example, tmp_path: Path) -> None:
    arguments = write(cloned, tmp_path)
    with pytest.raises(ConfigError, match=mentions("source.activation")):
        import_policy(**(arguments | {"source": DppoSource()}))
    with pytest.raises(ConfigError, match=mentions("source.activation")):
        import_policy(**(arguments | {"source": ReinflowSource()}))
    with pytest.raises(ConfigError, match=mentions("source.horizon")):
        imported(diffusion_policy("dp_unet1d_film"), tmp_path, source=DiffusionPolicySource(groups=4))
    arguments = write(cloned, tmp_path)
    bare = {"normalization": None, "identity": ["state", "action"]}
    unknown = replace(cloned.source, horizon=None, obs_steps=1)
    with pytest.raises(ConfigError, match=mentions("source.obs_steps")):
        import_policy(**(arguments | bare))
    with pytest.raises(ConfigError, match=mentions("source.action_dim")):
        import_policy(**(arguments | bare | {"source": unknown}))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"action_dim": 4}, "source.action_dim 4 3 network"),
        ({"horizon": 3}, "source.action_dim 4 network 3 statistics"),
        ({"horizon": 5}, "source.horizon 5 4 network"),
        ({"obs_steps": 2}, "source.obs_steps 2 1 statistics"),
    ],
)
def test_what_contradicts_the_tensors_is_refused(
    told: dict[str, int], message: str, cloned: Example, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        imported(cloned, tmp_path, source=replace(cloned.source, **told))


def test_a_feature_without_statistics_must_be_left_as_it_is_by_name(cloned: Example, tmp_path: Path) -> None:
    source = replace(cloned.source, obs_steps=1)
    for identity in ([], ["state"]):
        with pytest.raises(ConfigError, match=mentions("statistics")):
            imported(cloned, tmp_path, source=source, normalization=None, identity=identity)
    policy, conversion = imported(
        cloned, tmp_path, source=source, normalization=None, identity=["state", "action"]
    )
    assert torch.equal(policy.physical(cloned.x), cloned.x)
    assert policy.normalizer.modes == {"state": "identity", "action": "identity"}
    assert set(conversion.normalizer.values()) == {"identity, as asked for"}
    with pytest.raises(ConfigError, match=mentions("identity state action obs")):
        imported(cloned, tmp_path, identity=["obs"])


def test_a_map_that_is_not_asked_for_is_left_out(tmp_path: Path) -> None:
    of = diffusion_policy("dp_unet1d_film")
    policy, conversion = imported(of, tmp_path, identity=["action"])
    assert torch.equal(policy.physical(of.x), of.x)
    assert conversion.skipped["map of a feature that was not asked for"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda limits: limits.pop("obs_max"), "obs_max action_max action_min"),
        (lambda limits: limits.update(obs_min=np.zeros((2, 2))), "obs_min finite"),
        (lambda limits: limits["obs_min"].fill(np.nan), "obs_min finite"),
        (
            lambda limits: limits.update(obs_min=np.zeros(7), obs_max=np.ones(7)),
            "source.obs_steps",
        ),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, cloned: Example, tmp_path: Path
) -> None:
    arguments = write(cloned, tmp_path)
    limits = cloned.limits()
    change(limits)
    np.savez(tmp_path / "normalization.npz", **limits)
    with pytest.raises(ConfigError, match=mentions(message)):
        import_policy(**arguments)


def test_statistics_are_read_without_running_them(cloned: Example, tmp_path: Path) -> None:
    arguments, trace = write(cloned, tmp_path), tmp_path / "trace"
    np.savez(tmp_path / "normalization.npz", obs_min=np.array([Intruder(trace)], dtype=object))
    with pytest.raises(CheckpointError, match=mentions("normalization.npz read")):
        import_policy(**arguments)
    assert not trace.exists()
    with pytest.raises(CheckpointError, match=mentions("normalization=")):
        import_policy(**(arguments | {"normalization": tmp_path / "nowhere.npz"}))


def test_diffusion_policy_has_no_file_of_statistics(tmp_path: Path) -> None:
    of = diffusion_policy("dp_transformer")
    np.savez(tmp_path / "normalization.npz", **of.limits())
    with pytest.raises(ConfigError, match=mentions("DiffusionPolicySource")):
        imported(of, tmp_path, normalization=tmp_path / "normalization.npz")


def test_networks_without_a_counterpart_are_refused(tmp_path: Path) -> None:
    of, film = diffusion_policy("dp_unet1d_film"), "cond_encoder.1.weight"
    narrow = {name: value[:, :8] if name.endswith(film) else value for name, value in of.weights.items()}
    with pytest.raises(CapabilityError, match=mentions("obs_as_global_cond")):
        imported(replace(of, weights=narrow), tmp_path)
    path = tmp_path / "other.pt"
    torch.save({"model": {"obs_encoder.conv.weight": torch.zeros(2)}}, path)
    with pytest.raises(CapabilityError, match=mentions("encoder images")):
        import_policy(path, DiffusionPolicySource())
    torch.save({"model": {"network.vel_head.layers.0.weight": torch.zeros(2, 2)}}, path)
    with pytest.raises(CapabilityError, match=mentions("shortcut network")):
        import_policy(path, ReinflowSource(activation="relu"))
    torch.save({"model": {"what.weight": torch.zeros(2)}}, path)
    for source, message in (
        (DiffusionPolicySource(), "what.weight"),
        (ReinflowSource(activation="relu"), "FlowMLP what.weight"),
    ):
        with pytest.raises(CheckpointError, match=mentions(message)):
            import_policy(path, source)


def test_masks_of_another_transformer_are_refused(tmp_path: Path) -> None:
    of = diffusion_policy("dp_transformer")
    _, conversion = imported(of, tmp_path)
    assert conversion.skipped["rebuilt, and equal"] == 2
    seen = of.weights | {"memory_mask": torch.zeros_like(of.weights["memory_mask"])}
    with pytest.raises(CheckpointError, match=mentions("memory_mask")):
        imported(replace(of, weights=seen), tmp_path)


def test_a_normaliser_that_divides_by_zero_is_refused(tmp_path: Path) -> None:
    of = diffusion_policy("dp_unet1d_film")
    arguments = write(of, tmp_path)
    payload = workspace(of)
    payload["state_dicts"]["ema_model"]["normalizer.params_dict.action.scale"] = torch.zeros(3)
    torch.save(payload, arguments["path"])
    with pytest.raises(CheckpointError, match=mentions("action zeros")):
        import_policy(**arguments)


def test_a_sampler_of_another_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises((CapabilityError, ConfigError), match=mentions("sampler=ddim process=diffusion")):
        imported(reinflow("reinflow_reflow_loss"), tmp_path, sampler=DDIM(steps=2))
