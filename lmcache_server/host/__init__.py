"""The machine: /proc, limits, and the log on standard error."""
