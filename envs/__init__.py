"""The world: simulators, datasets, demonstrators, rollouts, evaluation."""
