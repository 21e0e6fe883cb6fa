"""The whole path, tiny: demonstrations, cloning, fine-tuning, evaluation, report, export; and resuming."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything
from safetensors.torch import load_file

import burnish
from algos.bc import Bc
from algos.training.signals import Interrupted
from burnish.api import Run, overrides_of
from burnish.commands import evaluate as evaluate_command
from burnish.commands import train as train_command
from burnish.commands.export import surroundings_of
from burnish.config.overrides import RunContext
from burnish.config.schema import compose_config
from burnish.console import log_lines
from burnish.reports.results import comparison_of
from burnish.runs.build import prepare
from burnish.runs.locate import locate
from burnish.runs.resolve import resolve
from burnish.runs.tasks import task_of
from envs.datasets import read_dataset
from envs.evaluation.evaluate import Evaluation
from envs.tasks.avoid.task import Avoid
from policies.errors import CheckpointError, ConfigError, DatasetError, ExportError, WriteError
from policies.paths import lasting

QUIET = {"num_workers": 0, "progress": False, "num_threads": 1}
TINY_BC = {"steps": 12, "warmup_steps": 0, "batch_size": 16, "log_every": 4, "validation_windows": 4}
TINY_PPO = {"num_envs": 2, "steps_per_iteration": 4, "iterations": 2, "batch_size": 16, "update_epochs": 1}
TINY_PPO |= {"tuned_steps": 3}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "avoid.hdf5"
    return burnish.collect(env="avoid", episodes=4, out=out)


@pytest.fixture(scope="module")
def base(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return burnish.clone(
        demonstrations,
        directory=tmp_path_factory.mktemp("runs") / "base",
        env="avoid",
        name="base",
        backbone={"width": 16},
        process={"num_levels": 5},
        evaluation={"episodes": 2},
        trainer={"checkpoint_every": 4},
        **{f"algo.{key}": value for key, value in TINY_BC.items()},
        **QUIET,
    )


@pytest.fixture(scope="module")
def tuned(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return burnish.train(
        directory=tmp_path_factory.mktemp("runs") / "tuned",
        algo="dppo",
        env="avoid",
        init=base,
        evaluation={"episodes": 2},
        **{f"algo.{key}": value for key, value in TINY_PPO.items()},
        **{"algo.critic.width": 16},
        **QUIET,
    )


def test_collected_files_hold_what_was_asked_for(demonstrations: Path) -> None:
    dataset = read_dataset(demonstrations)
    assert dataset.num_episodes == 4
    assert dataset.success is not None and bool(dataset.success.all())
    with pytest.raises(DatasetError, match=mentions("exists overwrite=true")):
        burnish.collect(env="avoid", episodes=1, out=demonstrations)


def test_a_run_keeps_what_is_needed_to_understand_and_continue_it(base: Run, demonstrations: Path) -> None:
    names = {path.name for path in base.path.iterdir()}
    assert {
        "config.yaml",
        "overrides.txt",
        "environment.json",
        "metrics.jsonl",
        "eval",
        "checkpoints",
    } <= names
    config = base.directory.config
    assert config["algo"]["name"] == "bc" and config["backbone"]["width"] == 16
    assert config["dataset"] == str(demonstrations)
    assert base.directory.checkpoints() == [4, 8, 12]


def test_a_run_remembers_the_checkpoint_that_it_started_from(base: Run, tuned: Run) -> None:
    started_from = Path(tuned.directory.config["init"])
    assert (
        started_from == base.directory.policy_path(12).resolve()
    )  # a later checkpoint would be another start
    assert locate(started_from).label == locate(base.path).label


def test_a_policy_knows_its_task(base: Run) -> None:
    assert task_of(locate(base.path)).spec.name == "avoid"
    assert locate(base.path).provenance()["algo"] == "bc"


def test_fine_tuning_compares_on_the_same_episodes(base: Run, tuned: Run) -> None:
    result = burnish.evaluate(tuned, baseline=base, episodes=3, num_workers=0)
    assert result.comparison is not None and result.baseline is not None
    assert (
        [row.seed for row in result.evaluation.rows]
        == [row.seed for row in result.baseline.rows]
        == [0, 1, 2]
    )
    assert len(lines := str(result).splitlines()) < 10 and "3 episodes" in lines[0]
    assert str(result.comparison) in lines and lines[-1].endswith("json") and repr(result) == str(result)
    difference = result.evaluation.values("success").mean() - result.baseline.values("success").mean()
    assert result.comparison.difference.value == pytest.approx(difference)
    written = json.loads(result.path.read_text())
    assert result.path.parent == tuned.path / "eval"
    assert len(written["rows"]) == 3 and written["versus"]["episodes"] == 3
    assert comparison_of(written["versus"]) == result.comparison


def put_two_policies_called_p(base: Run, tuned: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    shutil.copytree(base.directory.policy_path(), "p")
    shutil.copytree(tuned.directory.policy_path(), "a/p")


def test_policies_with_one_name_keep_their_own_numbers(
    base: Run, tuned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_two_policies_called_p(base, tuned, tmp_path, monkeypatch)
    tables: list[Any] = []
    monkeypatch.setattr(evaluate_command, "summary_table", lambda rows: tables.append(list(rows)) or "")
    for policy, baseline in (("a/p", "p"), ("p", "p")):
        written = overrides_of((), {"policy": policy, "baseline": baseline, "episodes": 2, "num_workers": 0})
        evaluate_command.run(compose_config("eval", written), RunContext(tmp_path))
    assert [[name for name, _ in rows] for rows in tables] == [
        ["a/p", "p"],
        ["p (policy)", "p (baseline)"],
    ]
    (_, other), (_, again) = tables[0][1], tables[1][0]
    assert other.rows == again.rows


def test_evaluations_do_not_replace_one_another(
    base: Run, tuned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_two_policies_called_p(base, tuned, tmp_path, monkeypatch)
    pairs: list[tuple[Any, Any]] = [(base, "a/p"), (base, "p"), (base, None), ("p", None), ("a/p", None)]
    paths = {
        burnish.evaluate(policy, baseline=other, episodes=1, num_workers=0).path for policy, other in pairs
    }
    assert len(paths) == len(pairs)
    assert all(path.is_file() for path in paths)


def test_evaluation_does_not_depend_on_the_number_of_environments(base: Run, tmp_path: Path) -> None:
    rows = [
        burnish.evaluate(
            base, episodes=4, num_envs=n, num_workers=0, out=tmp_path / f"{n}.json"
        ).evaluation.rows
        for n in (1, 3)
    ]
    assert rows[0] == rows[1]


def test_another_task_is_told_and_not_reported_as_the_own_one(
    base: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = burnish.evaluate(base, "env=avoid", episodes=3, num_workers=0).evaluation.protocol_hash[:12]
    assert not caplog.records
    short = burnish.evaluate(base, "env=avoid", "env.max_episode_steps=7", episodes=5, num_workers=0)
    assert "env.max_episode_steps=" in caplog.text and "here 7" in caplog.text
    page = burnish.report(base, episodes=0, out=tmp_path / "own").read_text()
    assert own in page and short.evaluation.protocol_hash[:12] not in page


def test_several_seeds_share_a_report(base: Run, tmp_path: Path) -> None:
    other = shutil.copytree(base.path, tmp_path / "other")
    page = burnish.report([base, other], episodes=0, out=tmp_path / "both").read_text()
    assert "2 runs" in page and "<th>all runs</th>" in page


@pytest.mark.usefixtures("small_pictures")
def test_runs_of_different_kinds_are_not_summarised_together(base: Run, tuned: Run, tmp_path: Path) -> None:
    index = burnish.report([base, tuned], episodes=1, num_workers=0, out=tmp_path / "two")
    page = index.read_text()
    for unit in ("gradient steps", "env steps"):
        assert page.count(f"Numbers logged while training, over {unit}.") == 1
    for title in ("bc on avoid", "dppo on avoid"):
        assert page.count(f"<h3>{title}</h3>") == 3, "of its result, its curves and its evaluations"
    assert "all runs" not in page and "base@12: " in page and "before: " in page and "after: " in page
    written = {path.name for path in index.parent.iterdir()}
    assert {"behaviour-1.png", "behaviour-2.png"} <= written


def test_a_report_is_replaced_only_when_asked(base: Run, tmp_path: Path) -> None:
    index = burnish.report(base, episodes=0, out=tmp_path)
    kept, stale = tmp_path / "own.png", tmp_path / "behaviour-7.png"
    for path in (index, kept, stale):
        path.write_text("before")
    with pytest.raises(ConfigError, match=mentions("exists overwrite=true")):
        burnish.report(base, episodes=0, out=tmp_path)
    assert index.read_text() == "before"
    burnish.report(base, episodes=0, out=tmp_path, overwrite=True)
    assert "<h2>Learning</h2>" in index.read_text()
    assert kept.exists() and not stale.exists()


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it the README's path exports")
def test_an_export_reproduces_the_tuned_policy(tuned: Run, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    report = burnish.export(tuned, out=tmp_path / "exported")
    assert report.worst <= report.tolerance
    assert (tmp_path / "exported" / "policy.onnx").stat().st_size > 0
    with pytest.raises(ExportError, match=mentions("exists overwrite=true")):
        burnish.export(tuned, out=tmp_path / "exported")


def test_an_export_knows_what_the_task_of_its_policy_says(base: Run) -> None:
    facts, spec = surroundings_of(locate(base.path), burnish.load_policy(base)), Avoid().spec
    assert (facts.task, facts.control_hz) == ("avoid", 20.0)
    assert (facts.obs_names, facts.action_names) == (spec.obs_names, spec.action_names)
    assert (facts.action_low, facts.action_high) == (spec.action_low, spec.action_high)


def test_a_policy_that_is_saved_anew_still_knows_its_task(
    base: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = burnish.load_policy(base)
    saved = burnish.save_policy(policy, tmp_path / "saved")
    own = surroundings_of(locate(base.path), policy)
    assert surroundings_of(locate(saved), policy) == own and not caplog.records
    burnish.save_policy(policy, saved, provenance={})
    assert surroundings_of(locate(saved), policy).action_low is None
    assert "knows no limits" in caplog.text and "or saved without its provenance" in caplog.text


def assert_same_policy(one: Run, other: Run) -> None:
    """Require equal weights of the last checkpoint, which is at the same step."""
    assert one.directory.latest() == other.directory.latest()
    expected, found = (load_file(run.directory.policy_path() / "model.safetensors") for run in (one, other))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("which", ["base", "tuned"])
def test_resuming_continues_bit_exactly(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run: Run = request.getfixturevalue(which)
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, symlinks=True)
    *_, last = run.directory.checkpoints()
    shutil.rmtree(copy / "checkpoints" / str(last))
    resumed = burnish.train(resume=copy)
    assert_same_policy(run, resumed)


def test_features_that_are_dropped_follow_from_the_seed(demonstrations: Path, tmp_path: Path) -> None:
    """Equal commands train equal weights, stopped or not, whatever a program has drawn before."""

    def trained(name: str, drawn: int) -> Run:
        torch.manual_seed(drawn)
        state = torch.get_rng_state()
        run = burnish.clone(
            demonstrations,
            "backbone=transformer",
            directory=tmp_path / name,
            algo=TINY_BC,
            backbone={"width": 8, "depth": 1, "heads": 1, "dropout": 0.5},
            trainer={"checkpoint_every": 4},
            **QUIET,
        )
        assert torch.equal(torch.get_rng_state(), state), "the program's own generator is left alone"
        return run

    one, other = trained("one", 1), trained("other", 2)
    assert_same_policy(one, other)
    *_, last = other.directory.checkpoints()
    shutil.rmtree(other.path / "checkpoints" / str(last))
    assert_same_policy(one, burnish.train(resume=other))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("process=gaussian", "process"),
        ("backbone.width=32", "backbone.width"),
        ("sampler=ddim", "sampler"),
        ("policy.horizon=4", "policy.horizon"),
    ],
)
@pytest.mark.parametrize("algo", ["bc", "dppo"])
def test_a_new_policy_beside_init_is_refused(
    algo: str, override: str, named: str, base: Run, demonstrations: Path
) -> None:
    with pytest.raises(ConfigError, match=mentions(f"init= {named}")):
        burnish.train(override, algo=algo, init=base, dataset=demonstrations, env="avoid")


def _prepare(*overrides: str) -> None:
    prepare(resolve(compose_config("train", ["env=avoid", *overrides]), RunContext(Path("unused"))))


def test_what_init_replaces_of_an_experiment_is_said(base: Run, caplog: pytest.LogCaptureFixture) -> None:
    _prepare(f"init={base}")
    _prepare(f"init={base}", "backbone.width=16")
    assert not caplog.text
    _prepare(f"init={base}", "backbone.width=17", "process=gaussian")
    assert "the policy of init keeps its own process, backbone" in caplog.text


def test_the_run_directory_of_commands_is_refused_in_python(demonstrations: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("hydra.run.dir directory=")):
        burnish.clone(demonstrations, f"hydra.run.dir={tmp_path}/run")


def test_a_run_is_not_overwritten(base: Run, demonstrations: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("resume=")):
        burnish.clone(demonstrations, directory=base.path, **{"algo.steps": 1, "algo.warmup_steps": 0})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("evaluation.steps", 100, "steps"),
        ("evaluation.steps", 0, "steps 1"),
        ("evaluation.noise_seed", -1, "noise_seed 0"),
        ("evaluation.first_seed", 10**30, "first_seed 0"),
        ("num_workers", -1, "num_workers 0"),
        ("seed", -1, "seed 0"),
        ("device", "meta", "device cuda meta"),
        ("device", "mps", "device cuda mps"),
        ("device", "cuda:99", "device=cuda:99"),
    ],
)
def test_what_would_fail_later_is_refused_before_training(
    key: str, value: Any, message: str, demonstrations: Path, tmp_path: Path
) -> None:
    values = {**QUIET, key: value, "directory": tmp_path / "run", "backbone": {"width": 8}}
    with pytest.raises(ConfigError, match=mentions(message)):
        burnish.clone(demonstrations, env="avoid", algo=TINY_BC, **values)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("algo", "typed", "level", "message"),
    [
        ("bc", {"evaluation.episodes": 3, "trainer.eval_every": 10}, "WARNING",
         "nothing is evaluated, in spite of evaluation.episodes, trainer.eval_every: "
         "give env=<task> as well."),
        ("td3_bc", {}, "INFO", "nothing is evaluated while training: give env=<task> for that."),
        ("bc", {}, "INFO", ""),
        ("bc", {"evaluation.episodes": 0}, "INFO", ""),
        ("td3_bc", {"env": "avoid", "evaluation.episodes": 1}, "INFO", ""),
    ],
)  # fmt: skip
def test_a_run_without_a_task_says_that_nothing_is_evaluated(
    algo: str, typed: dict[str, Any], level: str, message: str,
    demonstrations: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tiny = TINY_BC if algo == "bc" else {"steps": 4, "hidden_dims": [8], "critic_dims": [8]}
    with caplog.at_level(logging.INFO):
        burnish.train(
            directory=tmp_path / "run", algo=algo, dataset=demonstrations,
            **{f"algo.{key}": value for key, value in tiny.items()}, **QUIET, **typed,
        )  # fmt: skip
    found = [(one.levelname, one.message) for one in caplog.records if "nothing is eval" in one.message]
    assert found == ([(level, message)] if message else [])


def test_a_stopped_run_names_the_command_that_continues_it(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advance = Bc.advance

    def stopped(self: Bc) -> Any:
        signal.raise_signal(signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(Bc, "advance", stopped)
    with pytest.raises(Interrupted):
        burnish.clone(
            demonstrations, directory=tmp_path / "run", algo=TINY_BC, backbone={"width": 8}, **QUIET
        )
    assert "its last checkpoint is 4" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(f"Continue with: burnish train resume={tmp_path / 'run'}")


def test_a_resumed_run_takes_values_of_its_own_parts(tuned: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tuned.path, copy, symlinks=True)
    longer = burnish.train("algo=dppo", resume=copy, **{"algo.iterations": 3})
    assert len(longer.directory.checkpoints()) == len(tuned.directory.checkpoints()) + 1
    assert longer.directory.config["algo"]["iterations"] == 3  # the run says what it was last run with
    assert longer.directory.overrides[-1] == "algo.iterations=3"


def test_what_was_typed_on_resume_is_checked_against_the_run(demonstrations: Path, tmp_path: Path) -> None:
    """A smallest rate above the default of the largest one, and below that of the run."""
    fast = TINY_BC | {"lr": 0.01}
    run = burnish.clone(demonstrations, directory=tmp_path / "run", algo=fast, backbone={"width": 8}, **QUIET)
    again = burnish.train(resume=run.path, **{"algo.min_lr": 0.005})
    assert again.directory.config["algo"]["min_lr"] == 0.005
    with pytest.raises(ConfigError, match=mentions("algo.min_lr 0 lr=0.01")):
        burnish.train(resume=run.path, **{"algo.min_lr": 0.02})


def test_what_was_typed_on_resume_changes_values_only(base: Run) -> None:
    with pytest.raises(ConfigError, match=mentions("key=value")):
        burnish.train("process=flow", resume=base)
    with pytest.raises(ConfigError, match=mentions("experiment=avoid_bc")):
        burnish.train("experiment=avoid_bc", resume=base)


def test_a_place_without_a_policy_is_described(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("policy=")):
        locate(tmp_path)


def test_keyword_values_are_written_in_the_grammar_of_overrides(tmp_path: Path) -> None:
    written = overrides_of(
        ("seed=1",),
        {"algo": {"lr": 1e-3, "epochs": None}, "policy.x": [1, 2], "out": "it's a=b, c", "on": True},
    )
    assert written == [
        "seed=1",
        "algo.lr=0.001",
        "algo.epochs=null",
        "policy.x=[1,2]",
        "out='it\\'s a=b, c'",
        "on=true",
    ]


def test_numbers_of_numpy_and_torch_are_written_as_plain_ones() -> None:
    numbers = {"a": np.float64(2.5), "b": np.int64(3), "c": np.bool_(True), "d": torch.tensor(0.5)}
    assert overrides_of((), numbers) == ["a=2.5", "b=3", "c=true", "d=0.5"]
    inside = compose_config("train", overrides_of((), {"reader.masks": [{"a": 1, "b": Path("x y")}]}))
    assert inside.reader == {"masks": [{"a": 1, "b": "x y"}]}
    nested = {"a": [np.float64(2.5), (np.int64(3),)], "b": {"c": np.arange(2)}}
    assert overrides_of((), nested) == ["a=[2.5,[3]]", "b.c=[0,1]"]
    assert compose_config("eval", overrides_of((), {"temperature": np.float64(2.5)})).temperature == 2.5


def test_objects_where_a_path_or_a_name_is_asked_for_are_refused(base: Run) -> None:
    policy = burnish.load_policy(base)
    for command in (burnish.rank, burnish.export):
        with pytest.raises(ConfigError, match=mentions("policy= burnish.save_policy text")):
            command(policy)
    with pytest.raises(ConfigError, match=mentions("init= DenoisingPolicy burnish.save_policy")):
        burnish.train(algo="dppo", init=policy)
    with pytest.raises(DatasetError, match=mentions("DenoisingPolicy")):
        burnish.clone(policy)
    with pytest.raises(ConfigError, match=mentions("baseline= object docs/evaluation.md")):
        burnish.evaluate(base, baseline=object())
    with pytest.raises(ConfigError, match=mentions("env= int")):
        burnish.evaluate(base, env=3)
    with pytest.raises(ConfigError, match=mentions("compose=")):
        burnish.compose([base, object()])


def test_a_loaded_policy_is_evaluated_as_its_run_is(base: Run, tmp_path: Path) -> None:
    loaded = burnish.evaluate(base.load_policy(), episodes=1, out=tmp_path / "loaded.json")
    same = burnish.evaluate(base, episodes=1, num_workers=0, out=tmp_path / "run.json")
    assert loaded.evaluation == same.evaluation


@pytest.mark.parametrize(
    ("key", "value"),
    [("operator", "or"), ("temperature", 2.0), ("search.keep", [2]), ("estimate.levels", 3),
     ("weights", [0.5, 0.5])],
)  # fmt: skip
def test_keys_of_a_composition_are_refused_beside_a_single_policy(base: Run, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=mentions(f"{key.partition('.')[0]} compose=")):
        burnish.evaluate(base, **{key: value})


@pytest.mark.parametrize(
    "text", [r"a\b", r"a\'b", "a'b'", "a\\", "${seed}/x", r"\${seed}", r"\\${seed}'\\", "", "a,b=[c]"]
)
def test_keyword_values_arrive_as_they_are(text: str) -> None:
    assert compose_config("train", overrides_of((), {"dataset": text})).dataset == text


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose_config("collect", ["out='~/x.hdf5'"]).out == str(tmp_path / "x.hdf5")
    assert compose_config("report", overrides_of((), {"run": ["~/a", "b"]})).run == [f"{tmp_path}/a", "b"]
    assert compose_config("serve", overrides_of(("policy=~/a",), {})).policy == str(tmp_path / "a")
    assert compose_config("serve", ["keys='~/k'"]).keys == str(tmp_path / "k")
    told = compose_config(
        "train",
        [
            "env=adroit-door",
            "env.starts='~/d'",
            "evaluation.steer.sketch='~/s'",
            "evaluation.steer.strategy=random",
        ],
    )
    assert (told.env.starts, told.evaluation.steer.sketch) == (f"{tmp_path}/d", f"{tmp_path}/s")


def test_files_of_the_parts_of_a_run_are_found_from_any_folder(
    tuned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(tuned.path, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path)
    Path("sketch.json").write_text('{"actions": [[0.0, 0.0]]}')
    steer = {"strategy": "biased_initialization", "sketch": "sketch.json"}
    burnish.train("algo=dppo", resume=copy, evaluation={"steer": steer}, **{"algo.iterations": 3})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = burnish.train("algo=dppo", resume=copy, **{"algo.iterations": 4})
    assert len(list((copy / "eval").iterdir())) > len(list((tuned.path / "eval").iterdir()))
    assert resumed.directory.config["evaluation"]["steer"]["sketch"] == str(tmp_path / "sketch.json")


def test_files_are_named_from_the_root_and_policies_of_the_hub_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = compose_config("train", ["algo=bc", "algo.teacher='hub://a/b'", "env=adroit-door", "env.starts=d"])
    kept = lasting(made)
    assert (kept.env.starts, kept.algo.teacher) == (str(tmp_path / "d"), "hub://a/b")
    assert lasting(kept) == kept and made.env.starts == "d"


@contextmanager
def no_logging_set_up() -> Iterator[None]:
    """Take the test runner's own handlers away."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_a_dict_sets_values_of_the_cloning_algorithm(demonstrations: Path, tmp_path: Path) -> None:
    run = burnish.clone(
        demonstrations, directory=tmp_path / "run", algo=TINY_BC, backbone={"width": 8}, **QUIET
    )
    assert run.directory.latest() == TINY_BC["steps"]
    with pytest.raises(ConfigError, match=mentions("algo=bc algo=dppo")):
        burnish.clone(demonstrations, algo="dppo")


def test_python_shows_the_lines_of_the_command_line(
    base: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base.path, tmp_path / "copy", symlinks=True)
    level = logging.getLogger("algos").level
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "12")
    with no_logging_set_up():
        burnish.train(resume=tmp_path / "copy")
    shown = capsys.readouterr()
    assert "algos.training.progress INFO: copy: 12/12 gradient steps" in shown.err and shown.out == ""
    assert logging.getLogger("algos").handlers == [] and logging.getLogger("algos").level == level


def test_python_leaves_logging_alone_where_the_program_has_set_it_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with no_logging_set_up():
        logging.getLogger().addHandler(logging.NullHandler())
        with log_lines():
            logging.getLogger("algos").warning("heard")
            assert logging.getLogger("algos").handlers == []
    assert capsys.readouterr().err == ""


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_played(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_command, "play", lambda *_, **__: pytest.fail("was played"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=mentions("out=")):
        burnish.evaluate(base, out=tmp_path)
    with pytest.raises(ConfigError, match=mentions("out=")):
        burnish.evaluate(base, out=tmp_path / "file" / "below.json")
    with pytest.raises(ConfigError, match=mentions("out=")):
        burnish.collect(env="avoid", episodes=1, out=tmp_path, overwrite=True)
    for command in (burnish.export, burnish.report):
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match=mentions(f"out={out}")):
                command(base, out=out)


def test_messages_name_keys_that_the_command_has(base: Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("nope")) as caught:
        burnish.report(tmp_path / "nope")
    assert "resume=" not in str(caught.value)
    copy = tmp_path / "policy"
    shutil.copytree(base.directory.policy_path(), copy)
    config = json.loads((copy / "config.json").read_text())
    del config["provenance"]["env"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=mentions("task")) as silent:
        task_of(locate(copy))
    assert "Give env=" not in str(silent.value)
    with pytest.raises(ConfigError, match=mentions("task env=")):
        burnish.evaluate(copy)


def test_wherever_a_policy_is_asked_for_a_run_will_do(base: Run) -> None:
    expected = burnish.load_policy(base.directory.policy_path()).state_dict()
    for given in (base, base.path, str(base), base.directory.checkpoint_path()):
        found = burnish.load_policy(given).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_loaded_policy_acts(tuned: Run) -> None:
    policy = burnish.load_policy(tuned.directory.policy_path())
    generator = torch.Generator().manual_seed(0)
    action = policy.act(np.zeros((3, 1, 4)), generator=generator)
    assert action.shape == (3, 4, 2) and bool(action.isfinite().all())


def test_a_place_that_minari_cannot_have_is_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.commands.collect.collect", lambda *_, **__: pytest.fail("recorded"))
    with pytest.raises(DatasetError, match=mentions("Minari demos demos-v0")):
        burnish.collect(env="avoid", episodes=1, out=tmp_path / "demos", format="minari")
    (tmp_path / "notes-v0").mkdir()
    (tmp_path / "notes-v0" / "a.txt").write_text("mine")
    with pytest.raises(DatasetError, match=mentions("Minari notes-v0")):
        burnish.collect(env="avoid", episodes=1, out=tmp_path / "notes-v0", overwrite=True)


def test_a_file_of_an_evaluation_is_written_whole_or_not_at_all(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "eval.json"
    burnish.evaluate(base, episodes=2, num_workers=0, out=out)
    before = out.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        burnish.evaluate(base, episodes=3, num_workers=0, out=out)
    assert out.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_a_run_that_takes_no_file_is_refused_before_anything_is_played(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_command, "play", lambda *_, **__: pytest.fail("was played"))
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=mentions(f"{base.path}/eval out=<file>")):
        burnish.evaluate(base, episodes=2)
    with pytest.raises(ConfigError, match=mentions(f"out={tmp_path / 'eval.json'} read-only")):
        burnish.evaluate(base, episodes=2, out=tmp_path / "eval.json")


def test_a_folder_that_takes_no_files_is_refused_before_anything_is_played(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.commands.report._behaviours", lambda *_: pytest.fail("was played"))
    monkeypatch.setattr("burnish.commands.export.export_onnx", lambda *_, **__: pytest.fail("was exported"))
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=mentions(f"out={base.path / 'report'} read-only")):
        burnish.report(base)
    (tmp_path / "exported").mkdir()
    with pytest.raises(ConfigError, match=mentions(f"out={tmp_path / 'exported'} read-only")):
        burnish.export(base, out=tmp_path / "exported", overwrite=True)


def test_an_evaluation_that_cannot_be_written_is_shown(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(WriteError, match=mentions("eval.json cannot be written")):
        burnish.evaluate(base, episodes=2, num_workers=0, out=tmp_path / "eval.json")
    assert "95 % interval" in capsys.readouterr().out


def test_a_baseline_that_is_interrupted_loses_no_episodes_of_the_policy(
    base: Run, tuned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, out = evaluate_command.play, tmp_path / "eval.json"
    mine = burnish.evaluate(tuned, episodes=2, num_workers=0, out=tmp_path / "alone.json").evaluation

    def interrupted(label: str, policy: Any, *rest: Any, **options: Any) -> Evaluation:
        if label == locate(base.path).label:
            raise KeyboardInterrupt
        return play(label, policy, *rest, **options)

    monkeypatch.setattr(evaluate_command, "play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        burnish.evaluate(tuned, baseline=base, episodes=2, num_workers=0, out=out)
    assert Evaluation.from_json(out.read_text()).rows == mine.rows
    assert "versus" not in json.loads(out.read_text())


def test_an_algorithm_that_learns_in_an_environment_takes_no_dataset(tmp_path: Path) -> None:
    config = compose_config("train", ["algo=ppo", "env=avoid", "process=gaussian", "dataset=some.hdf5"])
    with pytest.raises(ConfigError, match=mentions("algo=ppo")):
        train_command.train(config, RunContext(tmp_path / "run"))
