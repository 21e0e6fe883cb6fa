"""On-policy fine-tuning: the loop, the PPO update, one file per likelihood ratio."""
