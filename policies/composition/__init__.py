"""Several policies that act as one."""
