"""Experiments: arms × learning rates × seeds at equal budgets, and the statistics over them.

`plan` reads an `experiment.toml`, `schedule` says which runs follow from it, `workers` run them,
`outcomes` are what a run measured, `arms` and `contrasts` compare them, `summary` writes
`results.json`. Nothing is imported here.
"""
