"""Who synchronises what, and how: options, prices, solvers and their reasons."""
