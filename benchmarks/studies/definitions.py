"""What the learning studies run: tasks, where demonstrations come from, and an experiment per algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Study:
    """One task: where its demonstrations come from and which experiments are run on it."""

    env: str
    demonstrations: int | None  # recorded per seed; None: a dataset file is given
    bases: dict[str, str]  # name of a run -> experiment that clones its initial policy; without: from scratch
    tuned: dict[str, str]  # name of a run -> experiment that trains it; overrides of both after blanks
    quantity: str  # success | return
    levels: tuple[float, ...]  # of the quantity, whose first times are reported
    origin: str = ""  # where the dataset file comes from
    remark: str = ""  # what a reader of its page has to know
    noise: float | None = None  # of the expert, in its own units; None: as the task has it
    options: tuple[str, ...] = ()  # of the task, for its demonstrations
    led: dict[str, str] = field(default_factory=dict)  # run from scratch -> experiment of its guide's clone


HOPPER_ORIGIN = (
    "It was recorded in Hopper-v5 from the stochastic SAC actor of a public agent zoo, in D4RL's layout; "
    "the file is not part of this project. Another Hopper-v5 file of medium quality serves as well."
)

SURROGATES = {
    "ppo": "",
    "spo": "algo.surrogate=spo",
    "dpo_drift": "algo.surrogate=dpo_drift",
    "bpo": "algo.surrogate=bpo",
    "fixpo": "algo.surrogate=fixpo algo.target_kl=0.1",
    "trpo": "algo.surrogate=trpo algo.target_kl=0.01",
}
"""What bounds the update of DPPO, by overrides of its experiment."""

CRITICS_OF_AVOID = (
    *("qc", "idql", "expo", "residual", "dqc", "qam", "qam_edit", "qam_fql", "trqam", "famo2o", "fql"),
    "pa_rl",
)
"""Critics of chunks that take the settings of `avoid` to another task, values scaled to sizes of 1 to 10.

At a size of 1 critics on play of `cube-single` were above every return for more than 10,000 steps.
"""

_PLAY = "common/cube_single_play env=cube-single"
_FOUR_CRITICS = "algo.critics=4 algo.actor_every=2"
_EDITS = "algo.edit_init_std=0.1 algo.init_alpha=0.002 algo.actor_aggregate=min"

CRITICS_OF_PLAY = {
    **{algo: f"cube_single_play_{algo}" for algo in ("fql", "idql", "dqc", "qam")},
    "qam_edit": f"cube_single_play_qam algo=qam_edit algo.edit_scale=0.1 {_EDITS}",
    "qam_fql": "cube_single_play_qam algo=qam_fql algo.normalize_value=true",
    "trqam": f"{_PLAY} name=play_trqam algo=trqam {_FOUR_CRITICS} algo.divergence_budget=2",
    "residual": f"{_PLAY} name=play_residual algo=residual {_FOUR_CRITICS} algo.num_candidates=1 "
    f"algo.edit_scale=0.2 {_EDITS} algo.ramp_after=3000 algo.ramp_steps=1000",
    "famo2o": f"{_PLAY} name=play_famo2o algo=famo2o algo.refit=true algo.min_coefficient=8 "
    "algo.max_coefficient=14 algo.ema_decay=0.995",
    "qc": f"{_PLAY} name=play_qc algo=qc algo.num_candidates=8",
    "expo": f"{_PLAY} name=play_expo algo=expo {_FOUR_CRITICS} algo.num_candidates=4 algo.num_edited=4 "
    f"algo.edit_scale=0.2 {_EDITS}",
    "pa_rl": f"{_PLAY} name=play_pa_rl algo=pa_rl {_FOUR_CRITICS} algo.num_candidates=4 algo.num_ascended=2 "
    "algo.ascent_steps=5 algo.ascent_lr=0.02 algo.temperature=0.1 algo.refit=true algo.refit_after=20000 "
    "algo.actor_lr=1e-5 algo.ema_decay=0.995",
}
"""Critics that learn from play, and their experiments. All were set before any run of theirs.

Temperatures, scales of edits and coefficients are the published ones of such tasks, and one chunk is drawn
where the authors draw one; the start of edits, budgets, ramps, numbers of candidates and ascents are those of
`avoid`. PA-RL has four candidates, as EXPO has, for its time; it clones improved chunks only in the task, as
the released program does.
"""

STUDIES = {
    "avoid": Study(
        "avoid",
        20,
        {
            "dppo": "avoid_bc",
            "ppo": "avoid_gaussian_bc",
            "reinflow-r": "avoid_flow_bc",
            "reinflow-s": "avoid_shortcut_bc",
            "fpo": "avoid_flow_bc",
            "fpo++": "avoid_flow_bc",
            "awm": "avoid_flow_bc",
            "policyflow": "avoid_flow_bc",
            "gorl": "avoid_flow_bc",
            "dsrl": "avoid_flow_bc",
            "dsrl-sac": "avoid_flow_bc",
            "dsrl-diffusion": "avoid_bc",
            "dppo-edm": "avoid_edm_bc",
            "fpo++-edm": "avoid_edm_bc",
            "reinflow-ddim": "avoid_bc",
            "reinflow-mip": "avoid_mip_bc",
            "ppo-mixture": "avoid_mixture_bc",
            "qc": "avoid_flow_bc",
            "idql": "avoid_flow_bc",
            "fql": "avoid_flow_bc",
            "expo": "avoid_flow_bc",
            "residual": "avoid_flow_bc",
            "pa_rl": "avoid_flow_bc",
            "qam": "avoid_flow_bc",
            "qam_edit": "avoid_flow_bc",
            "qam_fql": "avoid_flow_bc",
            "trqam": "avoid_flow_bc",
            "dqc": "avoid_flow_bc",
            "famo2o": "avoid_flow_bc",
            "recap": "avoid_flow_bc",
        },
        {
            "dppo": "avoid_dppo",
            "ppo": "avoid_ppo",
            "reinflow-r": "avoid_reinflow",
            "reinflow-s": "avoid_reinflow",
            "fpo": "avoid_fpo",
            "fpo++": "avoid_fpo_plus",
            "awm": "avoid_awm",
            "policyflow": "avoid_policyflow",
            "gorl": "avoid_gorl",
            "dsrl": "avoid_dsrl",
            "dsrl-sac": "avoid_dsrl algo.variant=sac algo.steering.adapter=row_repeat algo.init_alpha=0.003 "
            "algo.updates_per_step=0.5 algo.gamma=0.99 algo.tau=0.02",
            "dsrl-diffusion": "avoid_dsrl algo.denoising_steps=5",
            "dppo-edm": "avoid_dppo",
            "fpo++-edm": "avoid_fpo_plus",
            "reinflow-ddim": "avoid_reinflow algo.denoising_steps=5",
            "reinflow-mip": "avoid_reinflow",
            "ppo-mixture": "avoid_ppo",
            "rlpd": "avoid_rlpd",
            "qc": "avoid_qc",
            "idql": "avoid_idql",
            "fql": "avoid_fql",
            "expo": "avoid_expo",
            "residual": "avoid_residual",
            "pa_rl": "avoid_pa_rl",
            "qam": "avoid_qam",
            "qam_edit": "avoid_qam_edit",
            "qam_fql": "avoid_qam_fql",
            "trqam": "avoid_trqam",
            "dqc": "avoid_dqc",
            "famo2o": "avoid_famo2o",
            "recap": "avoid_recap",
        },
        "success",
        (0.7, 0.8, 0.9),
        remark="Settings of many rows were chosen in view of these seeds and episodes. [One table](table.md) "
        "has methods on seeds and episodes that no setting was chosen on: where the two differ, the table "
        "counts.",
    ),
    "surrogates": Study(
        "avoid",
        20,
        dict.fromkeys(
            (*SURROGATES, "sets", "steps", "correlated", "demonstrations", "values", "props"), "avoid_bc"
        ),
        {
            **{name: f"avoid_dppo {choice}".rstrip() for name, choice in SURROGATES.items()},
            "sets": "avoid_dppo algo.set_size=4 algo.reset_each_iteration=true algo.bc_weight=0",
            "steps": "avoid_dppo algo.reset_each_iteration=true algo.bc_weight=0",
            "correlated": "avoid_dppo algo.noise_correlation=0.5",
            "demonstrations": "avoid_dppo algo.bc_weight=0 algo.demo_weight=0.1",
            "values": "avoid_dppo algo.demo_value_weight=1",
            "props": "avoid_dppo algo.props_every=10",
        },
        "success",
        (0.7, 0.8, 0.9),
    ),
    "surrogates-hopper": Study(
        "hopper",
        None,
        dict.fromkeys(SURROGATES, "hopper_study_bc"),
        {
            name: f"hopper_study_dppo algo.env_steps=400000 {choice}".rstrip()
            for name, choice in SURROGATES.items()
        },
        "return",
        (2000.0, 2500.0, 3000.0),
        HOPPER_ORIGIN,
    ),
    "starts": Study(
        "avoid",
        20,
        {},
        {
            "ppo": "avoid_actor",
            "ppo-demonstrations": "avoid_actor",
            "ppo-guide": "avoid_actor",
            "sac": "avoid_sac",
            "sac-demonstrations": "avoid_sac",
            "sac-guide": "avoid_sac",
        },
        "success",
        (0.5, 0.8),
        led={
            "ppo-demonstrations": "",
            "ppo-guide": "avoid_flow_bc",
            "sac-demonstrations": "",
            "sac-guide": "avoid_flow_bc",
        },
    ),
    "avoid-moved": Study(
        "avoid",
        150,
        {
            "dppo": "avoid_moved_bc",
            "reinflow": "avoid_moved_bc",
            "reinflow-trained": "avoid_moved_bc",
            "dsrl": "avoid_moved_bc",
        },
        {
            "dppo": "avoid_moved_dppo",
            "reinflow": "avoid_moved_reinflow",
            "reinflow-trained": "avoid_moved_reinflow algo.encoder=trained algo.image_shift=2 "
            "algo.critic_input=own algo.update_epochs=5",
            "dsrl": "avoid_moved_dsrl",
            "rlpd": "avoid_moved_rlpd",
        },
        "success",
        (0.6, 0.7, 0.8),
        options=(
            "env.rows=moved",
            "env.observation=position",
            "env.cameras=[ahead]",
            "env.image_size=[48,48]",
        ),
    ),
    "goals": Study(
        "pointmaze-medium",
        200,
        dict.fromkeys(("dsrl", "gorl", "reinflow"), "pointmaze_goals_flow_bc"),
        {
            "dsrl": "pointmaze_goals_dsrl",
            "gorl": "pointmaze_goals_gorl",
            "reinflow": "pointmaze_goals_reinflow",
        },
        "success",
        (0.6, 0.7, 0.8),
        options=(
            "env.goal=separate",
            "env.control=waypoint",
            "env.hold=10",
            "env.max_episode_steps=60",
            "env.expert.detour=8",
        ),
    ),
    "lift-seen": Study(
        "lift",
        100,
        {"dsrl": "lift_study_image_flow_bc"},
        {"dsrl": "lift_study_image_dsrl"},
        "success",
        (0.7, 0.8, 0.9),
        noise=0.3,
        options=(
            "env.observation=proprioception",
            "env.cameras=[agentview]",
            "env.image_size=[64,64]",
            "env.image_shadows=false",
            "env.image_samples=0",
            "env.max_episode_steps=100",
        ),
    ),
    "hopper": Study(
        "hopper",
        None,
        {
            "dppo": "hopper_study_bc",
            "ppo": "hopper_study_gaussian_bc",
            "reinflow-r": "hopper_study_flow_bc",
            "reinflow-s": "hopper_study_shortcut_bc",
            "fpo++": "hopper_study_flow_bc",
            "dsrl": "hopper_study_flow_bc",
            "dsrl-sac": "hopper_study_flow_bc",
        },
        {
            "dppo": "hopper_study_dppo",
            "ppo": "hopper_study_ppo",
            "reinflow-r": "hopper_study_reinflow",
            "reinflow-s": "hopper_study_reinflow",
            "fpo++": "hopper_study_fpo_plus",
            "dsrl": "hopper_study_dsrl",
            "dsrl-sac": "hopper_study_dsrl algo.variant=sac",
            "rlpd": "hopper_rlpd",
        },
        "return",
        (2500.0, 3000.0),
        HOPPER_ORIGIN,
    ),
    "cube-single": Study(
        "cube-single",
        9,
        {
            "dppo": "cube_single_bc",
            "ppo": "cube_single_gaussian_bc",
            "reinflow-r": "cube_single_flow_bc",
            "reinflow-s": "cube_single_shortcut_bc",
            "fpo++": "cube_single_flow_bc",
            "dsrl": "cube_single_flow_bc",
            "dsrl-sac": "cube_single_flow_bc",
        },
        {
            "dppo": "cube_single_dppo",
            "ppo": "cube_single_ppo",
            "reinflow-r": "cube_single_reinflow",
            "reinflow-s": "cube_single_reinflow",
            "fpo++": "cube_single_fpo_plus",
            "dsrl": "cube_single_dsrl",
            "dsrl-sac": "cube_single_dsrl algo.variant=sac",
            "rlpd": "cube_single_rlpd",
        },
        "success",
        (0.8, 0.9),
    ),
    "hopper-from-scratch": Study(
        "hopper", None, {}, {"ppo": "hopper_actor", "fpo": "hopper_fpo_actor"}, "return", (500.0, 900.0)
    ),
    "lift": Study(
        "lift",
        4,
        {
            "dppo": "lift_study_bc",
            "ppo": "lift_study_gaussian_bc",
            "reinflow-r": "lift_study_flow_bc",
            "reinflow-s": "lift_study_shortcut_bc",
            "fpo++": "lift_study_flow_bc",
            "dsrl": "lift_study_flow_bc",
            "dsrl-sac": "lift_study_flow_bc",
        },
        {
            "dppo": "lift_study_dppo",
            "ppo": "lift_study_ppo",
            "reinflow-r": "lift_study_reinflow",
            "reinflow-s": "lift_study_reinflow",
            "fpo++": "lift_study_fpo_plus",
            "dsrl": "lift_study_dsrl",
            "dsrl-sac": "lift_study_dsrl algo.variant=sac",
            "rlpd": "lift_study_rlpd",
        },
        "success",
        (0.8, 0.9),
    ),
    "cube-single-varied": Study(
        "cube-single",
        60,
        {
            "dppo": "cube_single_bc algo.steps=6000",
            "dsrl": "cube_single_flow_bc algo.steps=6000",
            "dsrl-sac": "cube_single_flow_bc algo.steps=6000",
            **dict.fromkeys(CRITICS_OF_AVOID, "cube_single_flow_bc algo.steps=6000"),
        },
        {
            "dppo": "cube_single_dppo algo.env_steps=200000",
            "dsrl": "cube_single_dsrl",
            "dsrl-sac": "cube_single_dsrl algo.variant=sac",
            "rlpd": "cube_single_rlpd",
            **{
                algo: f"avoid_{algo} env=cube-single algo.gamma=0.99 algo.reward_scale=0.1"
                for algo in CRITICS_OF_AVOID
            },
            "dqc": "avoid_dqc env=cube-single algo.gamma=0.99 algo.reward_scale=0.1 "
            "algo.value_min=-10 algo.value_max=0",
            "qam": "avoid_qam env=cube-single algo.gamma=0.99 algo.reward_scale=0.1 "
            "algo.inverse_temperature=10",  # as from play: values are ten times those of avoid
        },
        "success",
        (0.8, 0.9),
        noise=0.8,
    ),
    "cube-single-play": Study(
        "cube-single",
        None,
        dict.fromkeys((*CRITICS_OF_PLAY, "dsrl"), "cube_single_play_bc"),
        CRITICS_OF_PLAY
        | {
            "dsrl": "cube_single_dsrl algo.total_steps=20000 algo.updates_per_step=1.0 "
            "algo.offline_ratio=0.5",
            "rlpd": "cube_single_rlpd algo.total_steps=20000 policy.horizon=5 policy.act_steps=5",
        },
        "success",
        (0.8, 0.9),
        origin="It is play by OGBench's recipe, with the rewards of the first task: "
        "`burnish collect env=cube-single env.expert.mode=play episodes=200 num_workers=2 out=play.hdf5`.",
    ),
    "lift-varied": Study(
        "lift",
        15,
        {
            "dppo": "lift_study_bc algo.steps=3000",
            "dsrl": "lift_study_flow_bc algo.steps=3000",
            "dsrl-sac": "lift_study_flow_bc algo.steps=3000",
            **dict.fromkeys(("gorl", "recap", *CRITICS_OF_AVOID), "lift_study_flow_bc algo.steps=3000"),
        },
        {
            "dppo": "lift_study_dppo algo.env_steps=200000",
            "dsrl": "lift_study_dsrl",
            "dsrl-sac": "lift_study_dsrl algo.variant=sac",
            "rlpd": "lift_study_rlpd algo.total_steps=60000",
            "gorl": "avoid_gorl env=lift env.max_episode_steps=100 algo.num_envs=20 "
            "algo.reset_each_iteration=true algo.env_steps=200000 algo.gamma=0.99 algo.actor_lr=1e-3",
            **{
                algo: f"avoid_{algo} env=lift env.max_episode_steps=100 algo.reward_scale=0.02"
                for algo in CRITICS_OF_AVOID
            },
            "recap": "avoid_recap env=lift env.max_episode_steps=100 algo.gamma=0.99",
            "famo2o": "avoid_famo2o env=lift env.max_episode_steps=100 algo.reward_scale=0.02 "
            "algo.actor_lr=1e-5 algo.min_coefficient=5 algo.max_coefficient=40",
        },
        "success",
        (0.8, 0.9),
        noise=0.3,
    ),
    "can-varied": Study(
        "can",
        40,
        {
            "dppo": "can_study_bc",
            "dsrl": "can_study_flow_bc",
            "dsrl-sac": "can_study_flow_bc",
        },
        {
            "dppo": "can_study_dppo",
            "dsrl": "can_study_dsrl",
            "dsrl-sac": "can_study_dsrl algo.variant=sac",
            "rlpd": "can_study_rlpd",
        },
        "success",
        (0.7, 0.8, 0.9),
        noise=0.15,
    ),
}
