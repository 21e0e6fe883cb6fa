"""The commands, one module each; a module is imported when its command is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Command:
    """A command: its line on the front page, and its module.

    A command with a `main_key` is a Hydra application: its module defines `run(config, context)` and the
    dataclass `schema`. Other commands take plain arguments: their module defines `main(arguments)`.
    """

    name: str
    main_key: str  # key suggested for a bare word in error messages; empty: plain arguments
    summary: str
    arguments: str  # of the example on the front page
    module: str = ""  # in `burnish.commands`; empty: the name
    config_module: str = ""  # of the schema, where it is imported without the command; empty: `module`
    takes_bare: bool = False  # a bare first word is the value of the main key

    @property
    def config_name(self) -> str:
        """Name of the yaml file and, with `_schema`, of the dataclass in Hydra's store."""
        return self.name.replace(" ", "_")

    @property
    def schema(self) -> str | None:
        return f"{self.name.title().replace(' ', '')}Config" if self.main_key else None

    @property
    def example(self) -> str:
        return f"burnish {self.name} {self.arguments}".rstrip()

    def load(self) -> ModuleType:
        return importlib.import_module(f"burnish.commands.{self.module or self.config_name}")

    def config_class(self) -> type:
        home = importlib.import_module(self.config_module) if self.config_module else self.load()
        schema: type = getattr(home, str(self.schema))
        return schema


_COMMANDS = (
    Command(
        "collect",
        "env",
        "record demonstrations of a scripted expert, or episodes of a policy",
        "env=avoid episodes=50 out=avoid.hdf5",
    ),
    Command(
        "train",
        "dataset",
        "clone a policy from demonstrations, or fine-tune one by reinforcement",
        "experiment=avoid_dppo init=<run or policy directory>",
        config_module="burnish.config.train",
    ),
    Command(
        "eval",
        "policy",
        "evaluate a policy on seeded episodes, alone or against another one",
        "policy=<run> baseline=<other run> episodes=100",
        module="evaluate",
        config_module="burnish.config.evaluate",
    ),
    Command("watch", "policy", "show a policy in MuJoCo's viewer, in real time", "policy=<run>"),
    Command(
        "lab",
        "policy",
        "open a local page: a policy acts and follows the mouse, runs grow",
        "policy=<run>",
    ),
    Command("report", "run", "write one page of runs: result, curves, episodes, what was run", "run=<run>"),
    Command("runs", "", "list runs: last and best evaluation, time, the keys that differ", "runs"),
    Command(
        "rank",
        "policy",
        "make a policy that executes the best of several chunks, by its density, energy or critics",
        "policy=<run> num_candidates=16 out=ranked",
    ),
    Command(
        "export",
        "policy",
        "write a policy for a machine without PyTorch, with a parity report",
        "policy=<run> out=exported",
    ),
    Command("serve", "policy", "let robots ask a policy over the network", "policy=<run or exported folder>"),
    Command(
        "fleet learn",
        "policy",
        "train a policy on the episodes that robots send, and hand out new versions",
        "policy=<run> dataset=avoid.hdf5 out=fleet",
    ),
    Command(
        "fleet act",
        "env",
        "let a simulated robot act for a fleet and report its episodes",
        "env=avoid name=arm1 out=arm1",
    ),
    Command(
        "merge",
        "policies",
        "average the weights of policies that were trained from one",
        "policies=[<run>,<run>] init=<run> method=spherical",
    ),
    Command(
        "import",
        "weights",
        "make a policy of a checkpoint of another program: DPPO, LeRobot, robomimic, …",
        "weights=state_3000.pt source=dppo normalization=normalization.npz out=imported",
        module="importing",
    ),
    Command(
        "data inspect",
        "dataset",
        "describe a file of demonstrations: episodes, ranges, defects, what can be learned",
        "avoid.hdf5",
        takes_bare=True,
    ),
    Command(
        "data convert",
        "dataset",
        "write a dataset in another format: robomimic, Minari, D4RL, LeRobot",
        "avoid.hdf5 out=avoid-lerobot format=lerobot",
        takes_bare=True,
    ),
    Command(
        "data download",
        "name",
        "fetch a public dataset (D4RL, OGBench, robomimic, Minari), or list their names",
        "name=hopper-medium-v2",
        takes_bare=True,
    ),
    Command(
        "list",
        "",
        "list algos, envs, processes, encoders, backbones, samplers, sources, datasets or experiments",
        "envs",
    ),
    Command(
        "new",
        "",
        "begin a task, algo, process, sampler or reader of your own, with test and page",
        "task my_task",
    ),
    Command("doctor", "", "check the installation", ""),
)
COMMANDS = {command.name: command for command in _COMMANDS}
