"""Measuring: `specdec bench` and `specdec compare`. `docs/benchmarking.md` tells the method.

From prompts to a report: `questions` and `prompts` make what is said to every method, `methods`,
`ours` and `references` run it, `runner` measures units in turn and `record` keeps them, `cost` times blocks
by their width, `summary`, `statistics` and `forecast` turn measurements into figures, `report`, `charts` and
`page` show them. `compare` and `replay` tell a near-tie from a bug.
"""
