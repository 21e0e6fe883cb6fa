"""The evaluation protocol, paired comparison, confidence intervals."""
