"""Processes: what a denoiser's output means, and how training data is corrupted."""

from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.path import Process

__all__ = ["Process", "RectifiedFlow", "VPDiffusion"]
