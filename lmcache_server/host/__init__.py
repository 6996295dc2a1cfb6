"""The machine: /proc, limits, standard error."""
