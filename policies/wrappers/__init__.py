"""Policies around a policy: best of N, guidance, score correction, steered noise."""
