"""What the matrix products of a hot path cost by themselves: the share that no other program avoids.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.products [case ...] [--rounds 7]

writes docs/results/speed/products.json, beside the figures of other processors, and a table in
docs/speed.md. The products (and convolutions) of one call are recorded with their shapes, layouts and places
in memory, and played again without anything else, in turns with the call. Their arithmetic is also divided by
the speed of one large product, the most that PyTorch reaches on the processor. Times are processor times of
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from algos.a2pr import A2prConfig
from algos.base import Setup
from algos.iql import IqlConfig
from algos.offline.config import OfflineConfig
from algos.prdc import PrdcConfig
from algos.td3_bc import Td3BcConfig
from algos.training.memory import keep_freed_memory
from algos.training.provenance import describe_environment
from benchmarks.options import parser
from benchmarks.pages import keep, processor, record, replace_block, table
from benchmarks.speed.cases_learning import synthetic_experience
from benchmarks.speed.cases_lerobot import small_cloning
from benchmarks.speed.cases_offline import BLOCK, POOL, list_search_of, ours_of, synthetic_dataset
from benchmarks.speed.cases_offpolicy import Sides
from benchmarks.speed.cases_released import keep_some
from benchmarks.speed.page import milliseconds
from benchmarks.speed.sides import FT, OBS, dppo_run, our_policy, plain_nets, push_t, tape
from benchmarks.speed.timing import interleave

ATEN = torch.ops.aten
PRODUCTS = frozenset(
    (ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.mv, ATEN.addmv, ATEN.convolution,
     ATEN.convolution_backward)
)  # fmt: skip
ROWS = 100_000
LARGE = 1024  # rows and columns of the product whose speed is the peak

Call = Callable[[], object]


class Recorder(TorchDispatchMode):
    """Notes every product. What two of them read from one place in memory, they read from one place again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._places: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            mine = tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
            self.calls.append(partial(func, *mine[0], **mine[1]))
        return func(*args, **(kwargs or {}))

    def _stand_in(self, given: Tensor) -> Tensor:
        whole = given.untyped_storage()
        count = whole.nbytes() // given.element_size()
        place = self._places.get(whole.data_ptr())
        if place is None or len(place) < count or place.dtype != given.dtype:
            place = self._places[whole.data_ptr()] = torch.rand(count).to(given.dtype)
        return place.as_strided(given.shape, given.stride(), given.storage_offset())


def products_of(call: Call) -> Call:
    """Return a function that repeats the products of a call, and nothing else."""
    call()
    with Recorder() as seen:
        call()

    def again() -> None:
        with torch.no_grad():
            for product in seen.calls:
                product()

    return again


def arithmetic_of(call: Call) -> int:
    """Return the additions and multiplications of a call's products."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def peak() -> float:
    """Return additions and multiplications per second of one large product."""
    a, b = torch.rand(LARGE, LARGE), torch.rand(LARGE, LARGE)
    seconds = interleave({"large": lambda: a @ b}, rounds=9, slot_s=0.2, clock=time.process_time)["large"]
    return 2 * LARGE**3 / seconds


def offline(config: OfflineConfig, *, keeps_some: bool = False, has_lists: bool = False) -> tuple[Call, int]:
    """Return a block of steps on fixed data, and how many."""
    run = config.build(Setup(dataset=synthetic_dataset(ROWS), seed=0))
    pool = torch.randperm(len(run.table), generator=torch.Generator().manual_seed(5))[:POOL]
    if keeps_some:
        keep_some(run)
    if has_lists:
        list_search_of(run).make_lists(pool)
    return ours_of(run, pool), BLOCK


def decision(rows: int) -> tuple[Call, int]:
    """Return a decision of the MLP of DPPO on Hopper by 20 DDPM steps."""
    policy, generator = our_policy(plain_nets()[0], noise_clip=None), torch.Generator().manual_seed(rows)
    obs = torch.rand(rows, 1, OBS, generator=generator) * 2 - 1
    noise = tape(rows, 1, last=False)
    return lambda: policy.act(obs, noise=noise), 1


def large_decision() -> tuple[Call, int]:
    """Return a decision of Diffusion Policy's U-Net for Push-T by ten DDIM steps."""
    policy, generator = push_t()[1], torch.Generator().manual_seed(1)
    obs = torch.rand(1, 2, policy.obs_dim, generator=generator) * 2 - 1
    start = torch.randn(1, *policy.noise_shape, generator=generator)
    return lambda: policy.act(obs, noise=start), 1


def dppo_update() -> tuple[Call, int]:
    """Return a minibatch of DPPO on Hopper, (environment step, denoising step) rows."""
    run, rows = dppo_run(0, 1, 1), 50_000
    experience = synthetic_experience(run, rows)
    index = torch.randperm(rows * FT, generator=torch.Generator().manual_seed(4))[:rows]
    return lambda: run.learner.step(experience, index, draws=run.draws, train_actor=True), 1


CASES: dict[str, tuple[str, Callable[[], tuple[Call, int]]]] = {
    "td3_bc": ("step of TD3+BC", lambda: offline(Td3BcConfig())),
    "iql": ("step of IQL", lambda: offline(IqlConfig())),
    "a2pr": ("step of A2PR", lambda: offline(A2prConfig(), keeps_some=True)),
    "prdc": ("step of PRDC, a fresh actor", lambda: offline(PrdcConfig(), has_lists=True)),
    "dsrl": ("DSRL, 2 steps + distillation", lambda: (Sides("na", ROWS).ours, 1)),
    "dsrl_sac": ("DSRL by SAC, 2 steps", lambda: (Sides("sac", ROWS).ours, 1)),
    "decision_2": ("decision of 2 rows", lambda: decision(2)),
    "decision_40": ("decision of 40 rows", lambda: decision(40)),
    "decision_500": ("decision of 500 rows", lambda: decision(500)),
    "dppo": ("DPPO update, 50,000 rows", dppo_update),
    "unet": ("decision of a U-Net of 66 million numbers", large_decision),
    "cloning": ("step of cloning, U-Net of 64–128–256, batch 64", small_cloning),
}


def main() -> None:
    """Measure the cases and write their table."""
    asked = parser(__doc__)
    asked.add_argument("cases", nargs="*", choices=[*CASES, []])
    asked.add_argument("--rounds", type=int, default=7)
    options = asked.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    content = record("speed", "products").get("processors", {})
    mine = content.setdefault(processor(describe_environment()), {"cases": {}})
    mine["peak"] = peak()
    for name in options.cases or CASES:
        label, make = CASES[name]
        call, count = make()
        times = interleave(
            {"all": call, "products": products_of(call)},
            rounds=options.rounds, slot_s=0.2, clock=time.process_time,
        )  # fmt: skip
        mine["cases"][label] = row = {part: seconds / count for part, seconds in times.items()}
        row["at_peak"] = arithmetic_of(call) / count / mine["peak"]
        shares = [f"{row[part] / row['all']:6.0%}" for part in ("products", "at_peak")]
        print(f"{label:<50} {1e3 * row['all']:9.2f} ms", *shares, flush=True)
    mine["rounds"] = options.rounds
    keep("speed", "products", {"processors": content}, indent=1)
    replace_block("docs/speed.md", "products", lines(content))


def lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of the page, processors side by side."""
    names = sorted(found, key=str.casefold)
    rows = [
        [label, *(cell for name in names for cell in _cells(found[name]["cases"].get(label)))]
        for label, _ in CASES.values()
    ]
    columns = [column for name in names for column in (f"{name} [ms]", "products", "at peak")]
    rounds = ", ".join(f"{found[name]['rounds']} rounds on {name}" for name in names)
    head = f"`OMP_NUM_THREADS=1 python -m benchmarks.speed.products`, one thread, {rounds}:"
    return [head, "", *table(("call", *columns), rows)]


def _cells(row: Mapping[str, float] | None) -> tuple[str, ...]:
    if row is None:
        return "–", "–", "–"
    shares = (row.get(part) for part in ("products", "at_peak"))
    return milliseconds(row["all"]), *(f"{100 * one / row['all']:.0f} %" if one else "–" for one in shares)


if __name__ == "__main__":
    main()
