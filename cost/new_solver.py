"""A solver of integer programs (OR-Tools' CP-SAT) that leaves Ctrl-C to its caller."""

from ortools.sat.python import cp_model


def new_solver(workers: int = 1, seed: int = 0) -> cp_model.CpSolver:
    """Return a solver of so many threads; with one, equal seeds give equal answers.

    By itself CP-SAT takes SIGINT while it solves, and leaves a handler that ends the process.
    """
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    return solver
