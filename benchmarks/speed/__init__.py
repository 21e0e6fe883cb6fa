"""Speed of hot paths against peers measured in the same run."""
