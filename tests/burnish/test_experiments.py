"""Experiments compose, hold differences only, and run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dataset_files import write_d4rl_maze
from omegaconf import OmegaConf, flag_override
from pairwise import each_value, of_each, repeated

import configs
from burnish.commands import train as train_command
from burnish.config.nodes import GROUPS, node_of
from burnish.config.overrides import RunContext, experiments, presets
from burnish.config.schema import compose_config, to_command
from burnish.config.train import TrainConfig
from burnish.runs.resolve import resolve
from envs.datasets import EpisodeDataset, write_robomimic
from envs.datasets.episode import Episode
from policies import registry
from policies.errors import MissingExtraError
from policies.processes import RectifiedFlow, VPDiffusion
from policies.storage.policy_folder import load_policy

FOLDER = Path(configs.__file__).parent / "experiment"
OFFLINE = ("td3_bc", "prdc", "a2pr", "rebrac", "iql", "world")
PLANNERS = ("diffuser", "decision_diffuser", "trajectories")
CRITICS_OF_CHUNKS = (
    *(
        "qc",
        "idql",
        "fql",
        "expo",
        "residual",
        "dqc",
        "pa_rl",
        "qam",
        "qam_edit",
        "qam_fql",
        "trqam",
        "famo2o",
    ),
)
NEEDS_FLOW = ("reinflow", "fpo", "awm", "policyflow", "gorl", "dsrl", *CRITICS_OF_CHUNKS)
FROM_REPLAY = ("dsrl", "sac", "rlpd")
FRESH = ("sac", "rlpd")
QUICK = ("evaluation.episodes=0", "num_workers=0", "progress=false", "num_threads=1")
Cloned = Callable[..., tuple[Path, Path]]
LOOPS = ("OnPolicyConfig", "OffPolicyConfig", "ChunkCriticConfig", "TransitionsConfig")
CHOSEN_BY_DEFAULT = {"algo": "bc", "process": "diffusion", "encoder": "state", "backbone": "mlp"}


@cache
def _content(name: str) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Return parents, choices and own values of an experiment file."""
    data = yaml.load((FOLDER / f"{name}.yaml").read_text(), yaml.CSafeLoader)
    entries = data.pop("defaults", [])
    names = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    parents = [entry.removeprefix("/experiment/") for entry in names]
    choices = {
        key.removeprefix("override ").lstrip("/"): value
        for entry in entries
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    return parents, choices, data


def _choices(name: str) -> dict[str, str]:
    parents, own, _ = _content(name)
    found: dict[str, str] = {}
    for parent in parents:
        found |= _choices(parent)
    return found | own


def _ancestry(name: str) -> Iterator[str]:
    """Yield the files of an experiment, earliest first."""
    for parent in _content(name)[0]:
        yield from _ancestry(parent)
    yield name


def _is_offline(name: str) -> bool:
    return _choices(name).get("algo") in (*OFFLINE, *PLANNERS)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


@cache
def composed(name: str) -> TrainConfig:
    """Return the configuration of an experiment as it is; tests share it and change nothing."""
    config: TrainConfig = compose_config("train", [f"experiment={name}"])
    return config


def test_an_experiment_holds_differences_only_and_is_named_after_its_file() -> None:
    """Its keys and values are valid; that Hydra merges files the same way is a test of its own."""
    for name in experiments():
        assert merged_from_differences(name).name == name


def merged_from_differences(name: str) -> TrainConfig:
    """Return what the files of an experiment add up to; no value may repeat the one before."""
    parts = CHOSEN_BY_DEFAULT | _choices(name)
    tree = node_of(TrainConfig)
    with flag_override(tree, "no_deepcopy_set_nodes", True):
        for group in GROUPS:
            if parts.get(group) is not None:
                tree[group] = pickle.loads(_option(group, str(parts[group])))
    for file in _ancestry(name):
        for key, value in _leaves(_content(file)[2]):
            default = OmegaConf.select(tree, key, throw_on_missing=False)
            default = list(default) if OmegaConf.is_list(default) else default
            value = float(value) if isinstance(default, float) and value is not None else value
            assert value != default, f"{file}.yaml repeats the default {key}={value}"
            OmegaConf.update(tree, key, value)
    merged: TrainConfig = to_command(tree)
    return merged


@cache
def _option(group: str, name: str) -> bytes:
    """Return the pickled node of a part, or of a file with other defaults of one; it is copied quicker."""
    if name not in presets(group):
        return pickle.dumps(node_of(registry.lookup(group, name)))
    content = yaml.safe_load((FOLDER.parent / group / f"{name}.yaml").read_text())
    (base,) = content.pop("defaults")
    node = node_of(registry.lookup(group, base))
    for key, value in content.items():
        assert value != node[key], f"{group}/{name}.yaml repeats the default {key}={value}"
        node[key] = value
    return pickle.dumps(node)


def test_every_published_run_on_robomimic_begins_each_iteration_with_new_episodes() -> None:
    """As released: episodes there last exactly as long as an iteration."""
    names = [
        f"{task}_{algo}"
        for task in ("lift", "can", "square", "transport")
        for algo in ("dppo", "ppo", "reinflow")
    ]
    known = [name for name in names if name in experiments()]
    assert "transport_reinflow" in known
    for name in known:
        settings = [dict(_leaves(_content(file)[2])) for file in _ancestry(name)]
        assert any(one.get("algo.reset_each_iteration") for one in settings), name


def test_published_noise_on_images_reads_the_state_and_keeps_its_bounds() -> None:
    """As ReinFlow's released configurations of robomimic's images have it."""
    noise = _content("common/reinflow_image_online")[2]["algo"]["noise"]
    assert noise == {"input": "state", "min_std": 0.08, "max_std": 0.14, "hold": 1.0}


def _choices_made(name: str) -> list[list[str]]:
    """Return the groups that the file of an experiment chooses from itself; algorithms are run below."""
    return [sorted(_content(name)[1])]


@pytest.mark.parametrize("name", of_each(experiments(), _choices_made))
def test_an_experiment_composes_to_what_its_files_add_up_to(name: str) -> None:
    assert composed(name) == merged_from_differences(name)


@pytest.mark.parametrize(
    "name", repeated(["kitchen_mixed_bc", "hopper_bc", "lift_study_bc", "cube_single_bc"])
)
def test_a_typed_process_replaces_that_of_an_experiment(name: str) -> None:
    assert composed(name).process == VPDiffusion(prediction="eps")
    for typed, expected in (("flow", RectifiedFlow()), ("diffusion", VPDiffusion(prediction="x0"))):
        assert compose_config("train", [f"experiment={name}", f"process={typed}"]).process == expected


@pytest.mark.parametrize("name", [n for n in experiments() if n.endswith("_tuning")])
def test_tuning_without_a_policy_is_told(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = composed(name)
    assert config.requires_init
    resolve(config, RunContext(tmp_path))
    assert "these settings tune a policy: give init=<policy>" in caplog.text
    caplog.clear()
    resolve(compose_config("train", [f"experiment={name}", "requires_init=false"]), RunContext(tmp_path))
    assert not caplog.records


def test_every_experiment_says_what_it_is() -> None:
    """The first comment line is for Hydra; the next ones are for people."""
    lines = {name: (FOLDER / f"{name}.yaml").read_text().splitlines() for name in experiments()}
    assert all(text[0] == "# @package _global_" for text in lines.values())
    assert not [name for name, text in lines.items() if sum(line.startswith("# ") for line in text) < 2]


def _parts(name: str) -> tuple[str, str | None]:
    """Return the kind of loop of an experiment and the family of its task: contracts run all algorithms."""
    choices = _choices(name)
    task = registry.parts("env").get(choices.get("env", ""))
    bases = {base.__name__ for base in registry.lookup("algo", choices.get("algo", "bc")).__mro__}
    loop = next((one for one in LOOPS if one in bases), "")
    return loop, None if task is None else task().spec.family


@pytest.mark.parametrize("name", of_each((n for n in experiments() if n.endswith("_actor")), _parts))
def test_one_tiny_iteration_from_scratch(name: str, tmp_path: Path) -> None:
    few = ["algo.num_envs=2", "algo.steps_per_iteration=4", "algo.env_steps=8", "algo.batch_size=4"]
    tiny = [f"experiment={name}", *few, "evaluation.episodes=0", "progress=false"]
    outcome = train_command.train(compose_config("train", tiny), RunContext(tmp_path / "run"))
    assert outcome.directory.latest() == 8


@pytest.mark.parametrize("name", of_each(filter(_is_offline, experiments()), _parts))
def test_two_tiny_steps_on_a_fixed_dataset(name: str, tmp_path: Path) -> None:
    chosen = [f"experiment={name}", *([] if "env" in _choices(name) else ["env=halfcheetah"])]
    config = compose_config("train", chosen)
    dataset = _random_dataset(config.env.spec, tmp_path / "data.hdf5", config.env)
    narrow = [f"algo.{part}=[16]" for part in ("hidden_dims", "critic_dims") if hasattr(config.algo, part)]
    if _choices(name)["algo"] in PLANNERS:
        narrow = ["policy.horizon=8", "policy.act_steps=1", "backbone.widths=[8,16]"]
    few = ["algo.steps=2", "algo.batch_size=8", "evaluation.episodes=0", "progress=false"]
    few += ["algo.warmup_steps=0"] if getattr(config.algo, "warmup_steps", 0) else []
    tiny = [*chosen, f"dataset={dataset}", *narrow, *few]
    outcome = train_command.train(compose_config("train", tiny), RunContext(tmp_path / "run"))
    stages = 2 if _choices(name)["algo"] == "world" and _cameras(config.env) else 1  # frames are coded first
    assert outcome.directory.latest() == 2 * stages


MAZES = [
    *((f"antmaze_{maze}_prdc", f"antmaze-{maze}", 29, 8, 31) for maze in ("umaze", "medium", "large")),
    ("antmaze_medium_prdc", "og-antmaze-medium", 29, 8, 29),
    ("antmaze_umaze_prdc", "pointmaze-umaze", 4, 2, 6),
]


@pytest.mark.parametrize(("maze", "compat"), each_value(MAZES, ["false", "true"]))
def test_mazes_train_on_files_of_d4rl_and_are_judged(
    maze: tuple[str, str, int, int, int], compat: str, tmp_path: Path
) -> None:
    """Their states hold no goal, which ends the state of a task that tells it there."""
    name, env, width, actions, state = maze
    file = write_d4rl_maze(tmp_path / "maze.hdf5", width, actions)
    few = ["algo.steps=2", "algo.batch_size=8", "algo.hidden_dims=[16]", "algo.critic_dims=[16]"]
    few += [f"reader.d4rl_compat={compat}", f"env={env}", "env.max_episode_steps=4", "evaluation.episodes=2"]
    tiny = [f"experiment={name}", f"dataset={file}", *few, "progress=false", "trainer.eval_every=0"]
    try:
        outcome = train_command.train(compose_config("train", tiny), RunContext(tmp_path / "run"))
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert load_policy(outcome.directory.policy_path()).obs_dim == state
    found = outcome.last_evaluation
    assert ("d4rl_score" in found) == env.startswith("antmaze")
    assert found.get("d4rl_score", 0.0) == 100 * found["success"] and "return_cvar" in found


def _algorithm(name: str) -> list[str]:
    return [_choices(name)["algo"]]


def _starts_fresh(name: str) -> bool:
    return _choices(name).get("algo") in FRESH


@pytest.mark.parametrize("name", of_each(filter(_starts_fresh, experiments()), _algorithm))
def test_a_few_tiny_steps_from_a_replay(name: str, tmp_path: Path) -> None:
    config = composed(name)
    few = ["algo.num_envs=2", "algo.batch_size=8", "algo.total_steps=16", "algo.warmup_steps=0"]
    narrow = ["algo.critic_dims=[16]", "backbone.hidden_dims=[16]", "algo.updates_per_step=0.5"]
    data = ["dataset=" + str(_random_dataset(config.env.spec, tmp_path / "data.hdf5", config.env))]
    rest = [*(data if config.algo.offline_ratio else []), "evaluation.episodes=0", "progress=false"]
    tiny = [f"experiment={name}", *few, *narrow, *rest]
    try:
        outcome = train_command.train(compose_config("train", tiny), RunContext(tmp_path / "run"))
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert outcome.directory.latest() is not None


def _tunes(name: str) -> bool:
    """Whether an experiment tunes a clone; `auto` names no algorithm (test_auto.py)."""
    starts = _is_offline(name) or _starts_fresh(name)
    return name != "auto" and not name.endswith(("_bc", "_actor")) and not starts


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Cloned:
    """Return dataset and run of a tiny clone on a task; experiments that begin alike share one."""
    made: dict[tuple[str, ...], tuple[Path, Path]] = {}

    def clone(env: Any, *overrides: str) -> tuple[Path, Path]:
        key = (repr(env), *overrides)
        if key not in made:
            folder = tmp_path_factory.mktemp("clone")
            dataset = _random_dataset(env.spec, folder / "data.hdf5", env)
            tiny = [
                "algo.epochs=null",
                "algo.steps=2",
                "algo.warmup_steps=0",
                "algo.batch_size=8",
                "backbone.width=16",
            ]
            config = compose_config("train", [*overrides, f"dataset={dataset}", *tiny, *QUICK])
            train_command.train(config, RunContext(folder / "base"))
            made[key] = dataset, folder / "base"
        return made[key]

    return clone


@pytest.mark.parametrize("name", of_each(filter(_tunes, experiments()), _parts))
def test_one_tiny_iteration_of_cloning_and_fine_tuning(name: str, cloned: Cloned, tmp_path: Path) -> None:
    one_tiny_iteration(name, cloned, tmp_path)


IMAGES = [name for name in filter(_tunes, experiments()) if "_image_" in name]


@pytest.mark.parametrize("name", of_each(IMAGES, _algorithm))
def test_one_tiny_iteration_from_images(name: str, cloned: Cloned, tmp_path: Path) -> None:
    one_tiny_iteration(name, cloned, tmp_path, "encoder.width=8", "encoder.features=8")


def one_tiny_iteration(name: str, cloned: Cloned, tmp_path: Path, *narrow: str) -> None:
    """Clone the policy that an experiment begins with, and tune it."""
    algo = _choices(name)["algo"]
    stem = name.removesuffix("_plus").removesuffix(f"_{algo}")
    base = f"{stem}_gaussian_bc" if algo in ("ppo", "cfpi") else f"{stem}_bc"
    if algo in NEEDS_FLOW and f"{stem}_flow_bc" in experiments():
        base = f"{stem}_flow_bc"
    process = ["process=flow"] if algo in NEEDS_FLOW else []
    dataset, init = cloned(composed(name).env, f"experiment={base}", *process, *narrow)
    few = ["algo.num_envs=2", "algo.steps_per_iteration=2", "algo.batch_size=8"]
    if algo == "srpo":
        few = ["algo.steps=2", "algo.warmup_steps=1", "algo.batch_size=8", f"dataset={dataset}"]
    elif algo in (*CRITICS_OF_CHUNKS, "cfpi"):
        few = ["algo.steps=2", "algo.batch_size=8", "algo.critic_dims=[16]", f"dataset={dataset}"]
        few += ["algo.online_steps=8", "algo.online.num_envs=2", "algo.online.warmup_steps=0"]
    elif algo == "recap":
        few = ["algo.steps=2", "algo.value_steps=2", "algo.warmup_steps=0", "algo.batch_size=8"]
        few += [f"dataset={dataset}"]
    elif algo in FROM_REPLAY:
        few += ["algo.total_steps=16", "algo.warmup_steps=0", "algo.critic_dims=[16]"]
    else:
        few += ["algo.iterations=1", "algo.env_steps=null", "algo.update_epochs=1", "algo.critic.width=16"]
    tuning = [f"experiment={name}", f"init={init}", *few, *QUICK]
    try:
        outcome = train_command.train(compose_config("train", tuning), RunContext(tmp_path / "tuned"))
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert outcome.directory.latest() is not None


def _cameras(env: Any) -> tuple[str, ...]:
    return tuple(getattr(env, "cameras", ()))


def _random_dataset(spec: Any, path: Path, env: Any) -> Path:
    """Write two episodes of noise with the widths of a task."""
    rng = np.random.default_rng(0)
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    made = [
        Episode(
            observations=rng.standard_normal((25, spec.obs_dim)),
            actions=rng.uniform(low, high, (24, spec.action_dim)),
            rewards=rng.standard_normal(24),
            terminated=False,
            truncated=True,
            images={name: rng.integers(0, 256, (24, *env.image_size, 3), np.uint8) for name in _cameras(env)},
            extras={"goal": rng.standard_normal((24, spec.goal_dim))} if spec.goal_dim else {},
        )
        for _ in range(2)
    ]
    write_robomimic(path, EpisodeDataset.from_episodes(made), env)
    return path
