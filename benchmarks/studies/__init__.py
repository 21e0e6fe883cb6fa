"""Studies of learning, composition, export and steering; each writes its page in docs/results."""
