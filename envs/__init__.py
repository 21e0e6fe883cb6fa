"""The world: simulators, datasets, experts, rollouts, evaluation."""
