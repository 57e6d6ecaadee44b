"""Comparisons of configurations: arms x seeds at equal FLOPs, steps or minutes."""
