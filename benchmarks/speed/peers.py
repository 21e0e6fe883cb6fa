"""What we compare with: the same arithmetic the way it is usually written.

Nothing here is tuned and nothing is crippled: a module that concatenates its inputs, a scheduler object
in the loop, both networks evaluated at every step, one Python loop over the minibatch for the discount,
gymnasium's own vector environments, a per-item DataLoader.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType

import gymnasium
import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def program(module: str, package: str) -> ModuleType:
    """Return a module of another program; ends with the package to install where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"a peer cannot be imported ({error}): pip install {package}") from error


class SinusoidalTime(nn.Module):
    """Sine and cosine features of the raw timestep."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tau: Tensor) -> Tensor:
        """(B,) -> (B, dim)."""
        half = self.dim // 2
        frequency = torch.exp(torch.arange(half, device=tau.device) * -(math.log(10000) / (half - 1)))
        angle = tau.float()[:, None] * frequency[None]
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


def time_features(dim: int, hidden: int) -> nn.Sequential:
    """Return a network of the raw timestep, (B,) -> (B, dim)."""
    return nn.Sequential(SinusoidalTime(dim), nn.Linear(dim, hidden), nn.Mish(), nn.Linear(hidden, dim))


class PlainMlp(nn.Module):
    """Residual MLP denoiser that concatenates chunk, time features and state."""

    def __init__(self, chunk: tuple[int, int], cond_dim: int, width: int = 512, time_dim: int = 16) -> None:
        super().__init__()
        self.chunk, size = chunk, chunk[0] * chunk[1]
        self.time = time_features(time_dim, 2 * time_dim)
        self.inp = nn.Linear(size + time_dim + cond_dim, width)
        self.hidden1, self.hidden2 = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, size)

    def forward(self, x: Tensor, tau: Tensor, state: Tensor) -> Tensor:
        """X (B, Th, Da), tau (B,), state (B, C) -> (B, Th, Da)."""
        h = self.inp(torch.cat([x.flatten(1), self.time(tau), state], dim=-1))
        h = h + self.hidden2(torch.relu(self.hidden1(torch.relu(h))))
        return self.out(h).view_as(x)


class PlainCritic(nn.Module):
    """Residual MLP value function."""

    def __init__(self, cond_dim: int, width: int = 256) -> None:
        super().__init__()
        self.inp = nn.Linear(cond_dim, width)
        self.hidden1, self.hidden2 = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.mish = nn.Mish()

    def forward(self, state: Tensor) -> Tensor:
        """(B, C) -> (B,)."""
        h = self.inp(state)
        return self.out(h + self.hidden2(self.mish(self.hidden1(self.mish(h))))).squeeze(-1)


class PlainConv(nn.Module):
    """Convolution, group normalisation, Mish."""

    def __init__(self, before: int, after: int, kernel: int = 5, groups: int = 8) -> None:
        super().__init__()
        conv = nn.Conv1d(before, after, kernel, padding=kernel // 2)
        self.block = nn.Sequential(conv, nn.GroupNorm(groups, after), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) -> (B, C', T)."""
        return self.block(x)


class PlainResidual(nn.Module):
    """Two convolutions with scale and bias from time and condition between them."""

    def __init__(self, before: int, after: int, cond_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PlainConv(before, after), PlainConv(after, after)])
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, 2 * after))
        self.residual_conv = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """X (B, C, T), cond (B, E) -> (B, C', T)."""
        scale, bias = self.cond_encoder(cond).unsqueeze(-1).chunk(2, dim=1)
        return self.blocks[1](scale * self.blocks[0](x) + bias) + self.residual_conv(x)


class PlainResample(nn.Module):
    """A convolution that halves or doubles the rows."""

    def __init__(self, width: int, *, doubles: bool) -> None:
        super().__init__()
        self.conv = (
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1)
            if doubles
            else nn.Conv1d(width, width, 3, stride=2, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) -> (B, C, T / 2 or 2 T)."""
        return self.conv(x)


class PlainUnet(nn.Module):
    """Conditional temporal U-Net on channels first; weights are named as Diffusion Policy's."""

    def __init__(
        self, chunk: tuple[int, int], cond_dim: int, widths: tuple[int, ...], time_dim: int = 256
    ) -> None:
        super().__init__()
        self.chunk, c = chunk, time_dim + cond_dim
        pairs = list(zip((chunk[1], *widths), widths, strict=False))
        self.diffusion_step_encoder = time_features(time_dim, 4 * time_dim)

        def level(before: int, after: int, resample: nn.Module) -> nn.ModuleList:
            return nn.ModuleList([PlainResidual(before, after, c), PlainResidual(after, after, c), resample])

        last = widths[-1]
        self.down_modules = nn.ModuleList(
            level(a, b, nn.Identity() if b == last else PlainResample(b, doubles=False)) for a, b in pairs
        )
        self.mid_modules = nn.ModuleList(PlainResidual(last, last, c) for _ in range(2))
        self.up_modules = nn.ModuleList(
            level(2 * b, a, PlainResample(a, doubles=True)) for a, b in reversed(pairs[1:])
        )
        self.final_conv = nn.Sequential(PlainConv(widths[0], widths[0]), nn.Conv1d(widths[0], chunk[1], 1))

    def forward(self, x: Tensor, tau: Tensor, state: Tensor) -> Tensor:
        """X (B, Th, Da), tau (B,), state (B, C) -> (B, Th, Da)."""
        h, skips = x.transpose(1, 2), []
        cond = torch.cat([self.diffusion_step_encoder(tau), state], dim=-1)
        for first, second, resample in self.down_modules:
            h = second(first(h, cond), cond)
            skips.append(h)
            h = resample(h)
        for block in self.mid_modules:
            h = block(h, cond)
        for first, second, resample in self.up_modules:
            h = resample(second(first(torch.cat([h, skips.pop()], dim=1), cond), cond))
        return self.final_conv(h).transpose(1, 2)


class PlainDitBlock(nn.Module):
    """Self-attention and a feed-forward network, each scaled, shifted and gated by time and condition."""

    def __init__(self, width: int, heads: int, signal: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(signal, 6 * width)

    def forward(self, h: Tensor, signal: Tensor) -> Tensor:
        """H (B, T, D), signal (B, E) -> (B, T, D)."""
        scale1, scale2, shift1, shift2, gate1, gate2 = self.modulation(signal).unsqueeze(1).chunk(6, dim=-1)
        b, t, d = h.shape
        qkv = self.qkv(self.norm1(h) * (1 + scale1) + shift1).view(b, t, 3, self.heads, d // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        h = h + gate1 * self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return h + gate2 * self.ffn(self.norm2(h) * (1 + scale2) + shift2)


class PlainDit(nn.Module):
    """A diffusion transformer over the rows of a chunk, evaluated anew at every step."""

    def __init__(
        self, chunk: tuple[int, int], cond_dim: int, width: int, depth: int, heads: int, time_dim: int
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.inlet, self.positions = nn.Linear(chunk[1], width), nn.Parameter(torch.zeros(chunk[0], width))
        self.time = time_features(time_dim, 2 * time_dim)
        self.cond = nn.Sequential(nn.Linear(cond_dim, width), nn.SiLU(), nn.Linear(width, width))
        signal = time_dim + width
        self.blocks = nn.ModuleList(PlainDitBlock(width, heads, signal) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation, self.outlet = nn.Linear(signal, 2 * width), nn.Linear(width, chunk[1])

    def forward(self, x: Tensor, time: Tensor, state: Tensor) -> Tensor:
        """X (B, Th, Da), time (B,), state (B, C) -> (B, Th, Da)."""
        signal = nn.functional.silu(torch.cat([self.time(time), self.cond(state)], dim=-1))
        h = self.inlet(x) + self.positions
        for block in self.blocks:
            h = block(h, signal)
        scale, shift = self.modulation(signal).unsqueeze(1).chunk(2, dim=-1)
        return self.outlet(self.norm(h) * (1 + scale) + shift)


@torch.no_grad()
def euler(net: nn.Module, state: Tensor, start: Tensor, steps: int, time_scale: float) -> Tensor:
    """Integrate velocities from start noise (B, Th, Da) by Euler steps."""
    x = start
    for k in range(steps):
        time = torch.full((len(state),), time_scale * k / steps)
        x = x + net(x, time, state) / steps
    return x.clamp(-1, 1)


def scheduler(levels: int = 20) -> DDPMScheduler:
    """The DDPM scheduler with the settings of the published policies."""
    return DDPMScheduler(
        levels, beta_schedule="squaredcos_cap_v2", variance_type="fixed_small", clip_sample=True
    )


@torch.no_grad()
def diffusers_sample(
    net: PlainMlp, schedule: DDPMScheduler, state: Tensor, generator: torch.Generator
) -> Tensor:
    """Sample chunks with a diffusers scheduler in the loop."""
    x = torch.randn((len(state), *net.chunk), generator=generator)
    schedule.set_timesteps(schedule.config.num_train_timesteps)
    for tau in schedule.timesteps:
        pred = net(x, tau.expand(len(state)), state)
        x = schedule.step(pred, tau, x, generator=generator).prev_sample
    return x


def ddim_scheduler(levels: int = 100) -> DDIMScheduler:
    """The DDIM scheduler with the settings of Diffusion Policy."""
    return DDIMScheduler(levels, beta_schedule="squaredcos_cap_v2", clip_sample=True)


@torch.no_grad()
def diffusers_ddim(
    net: PlainUnet, schedule: DDIMScheduler, state: Tensor, start: Tensor, steps: int = 10
) -> Tensor:
    """Sample chunks from start noise (B, Th, Da) with a diffusers DDIM scheduler in the loop."""
    x = start
    schedule.set_timesteps(steps)
    for tau in schedule.timesteps:
        x = schedule.step(net(x, tau.expand(len(state)), state), tau, x).prev_sample
    return x


class ReferenceStyle:
    """DPPO the straightforward way: sampling, scoring and update with every known waste left in."""

    def __init__(
        self, frozen: PlainMlp, tuned: PlainMlp, critic: PlainCritic, *, levels: int = 20, ft: int = 10
    ):
        self.frozen, self.tuned, self.critic, self.levels, self.ft = frozen, tuned, critic, levels, ft
        table = scheduler(levels)
        beta, abar = table.betas, table.alphas_cumprod
        prev = torch.cat([torch.ones(1), abar[:-1]])
        self.recip, self.recipm1 = (1 / abar).sqrt(), (1 / abar - 1).sqrt()
        self.coef_x0 = beta * prev.sqrt() / (1 - abar)
        self.coef_x = (1 - prev) * (1 - beta).sqrt() / (1 - abar)
        self.std = (beta * (1 - prev) / (1 - abar)).clamp(min=1e-20).sqrt()
        self.actor_optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-4, weight_decay=0.0)
        self.critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, weight_decay=0.0)

    def mean_std(self, x: Tensor, tau: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate the frozen network everywhere, then overwrite the rows of the tuned one."""
        eps = self.frozen(x, tau, state)
        late = torch.where(tau < self.ft)[0]
        if len(late) > 0:
            eps[late] = self.tuned(x[late], tau[late], state[late])
        shape = (-1, 1, 1)
        x0 = (self.recip[tau].view(shape) * x - self.recipm1[tau].view(shape) * eps).clamp(-1, 1)
        mean = self.coef_x0[tau].view(shape) * x0 + self.coef_x[tau].view(shape) * x
        return mean, self.std[tau].view(shape)

    @torch.no_grad()
    def sample(self, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return actions (B, Th, Da) and the chain (B, ft+1, Th, Da)."""
        x = torch.randn((len(state), *self.tuned.chunk), generator=generator)
        chain = [x] if self.ft == self.levels else []
        for step in reversed(range(self.levels)):
            tau = torch.full((len(state),), step)
            mean, std = self.mean_std(x, tau, state)
            noise = torch.randn(x.shape, generator=generator).clamp(-3, 3)
            x = mean + std.clamp(min=0.1) * noise
            if step <= self.ft:
                chain.append(x)
        return x, torch.stack(chain, dim=1)

    def log_prob(self, state: Tensor, x: Tensor, x_next: Tensor, tau: Tensor) -> Tensor:
        """Element-wise log-density of transitions."""
        mean, std = self.mean_std(x, tau, state)
        return torch.distributions.Normal(mean, std.clamp(min=0.1)).log_prob(x_next)

    @torch.no_grad()
    def chain_log_prob(self, state: Tensor, chain: Tensor, batch: int = 10_000) -> Tensor:
        """Score stored chains in a separate pass after the rollout; (N, ft, Th, Da)."""
        out = []
        for begin in range(0, len(state), batch):
            part, where = chain[begin : begin + batch], state[begin : begin + batch]
            x, x_next = part[:, :-1].flatten(0, 1), part[:, 1:].flatten(0, 1)
            tau = torch.arange(self.ft - 1, -1, -1).repeat(len(part))
            scored = self.log_prob(where.repeat_interleave(self.ft, 0), x, x_next, tau)
            out.append(scored.view(len(part), self.ft, *self.tuned.chunk))
        return torch.cat(out)

    def loss(
        self, state: Tensor, x: Tensor, x_next: Tensor, index: Tensor, old: Tensor, advantage: Tensor,
        returns: Tensor, *, clip: float = 0.01, gamma_denoising: float = 0.99,
    ) -> Tensor:  # fmt: skip
        """PPO loss of (environment step, denoising index) rows; `index` 0 is the noisiest tuned step."""
        tau = self.ft - 1 - index
        new = self.log_prob(state, x, x_next, tau).clamp(-5, 2).mean((-2, -1))
        ratio = torch.exp(new - old.clamp(-5, 2).mean((-2, -1)))
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        low, high = torch.quantile(advantage, 0.0), torch.quantile(advantage, 1.0)
        discount = torch.tensor([gamma_denoising ** (self.ft - int(i) - 1) for i in index])
        advantage = advantage.clamp(low, high) * discount
        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
        value = 0.5 * (self.critic(state) - returns).square().mean()
        return policy + 0.5 * value

    def update(self, *batch: Tensor) -> None:
        """One minibatch: whole-batch loss, backward, both optimisers."""
        loss = self.loss(*batch)
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        self.critic_optimizer.step()


class ChunkWrapper(gymnasium.Wrapper):
    """Executes a chunk of actions per call, stopping at the end of the episode."""

    def step(self, action: np.ndarray):
        """Execute rows one by one and sum their rewards."""
        total, terminated, truncated = 0.0, False, False
        for row in action:
            low, high = self.env.action_space.low, self.env.action_space.high
            obs, reward, terminated, truncated, info = self.env.step(np.clip(row, low, high))
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def chunked_env(name: str, act_steps: int) -> Callable[[], gymnasium.Env]:
    """Return a maker of chunk-executing gymnasium environments."""

    def make() -> gymnasium.Env:
        env = ChunkWrapper(gymnasium.make(name))
        box = env.env.action_space
        low, high = np.tile(box.low, (act_steps, 1)), np.tile(box.high, (act_steps, 1))
        env.action_space = gymnasium.spaces.Box(low, high, dtype=box.dtype)
        return env

    return make


class NaiveRollout:
    """Gymnasium environments of one name behind a chunk wrapper, policy and physics taking turns."""

    def __init__(self, program: ReferenceStyle, kind: type, name: str, num_envs: int) -> None:
        makers = [chunked_env(name, program.tuned.chunk[0]) for _ in range(num_envs)]
        self.envs, self.program = kind(makers), program
        self.obs, _ = self.envs.reset(seed=0)
        self.generator = torch.Generator().manual_seed(0)

    def collect(self, steps: int) -> dict[str, Tensor]:
        """Run chunk steps in every environment and store what an update needs."""
        states, chains, rewards, ended = [], [], [], []
        for _ in range(steps):
            state = torch.from_numpy(self.obs).float()
            action, chain = self.program.sample(state, self.generator)
            self.obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            states.append(state)
            chains.append(chain)
            rewards.append(torch.from_numpy(reward))
            ended.append(torch.from_numpy(terminated | truncated))
        columns = {"state": states, "chain": chains, "reward": rewards, "ended": ended}
        return {name: torch.stack(column) for name, column in columns.items()}


class ChunkDataset(Dataset):
    """One chunk per item, sliced in Python."""

    def __init__(self, states: Tensor, actions: Tensor, starts: list[int], horizon: int) -> None:
        self.states, self.actions, self.starts, self.horizon = states, actions, starts, horizon

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.starts)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        """Return (state, chunk) of one start."""
        start = self.starts[item]
        return self.states[start], self.actions[start : start + self.horizon]


def chunk_loader(states: Tensor, actions: Tensor, starts: list[int], horizon: int, batch: int) -> DataLoader:
    """Return a shuffling per-item loader in the same process."""
    return DataLoader(ChunkDataset(states, actions, starts, horizon), batch_size=batch, shuffle=True)
