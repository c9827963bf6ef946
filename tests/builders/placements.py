"""Small placement problems, drawn at random, and their optimum by trying everything."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations, product
from random import Random

from partc.cost.placement.problems.load import greatest_load, violations
from partc.cost.placement.problems.problem import Node, NodePlacement, Problem


def random_problem(
    seed: int,
    *,
    nodes: int = 7,
    accelerators: int = 2,
    cpus: int = 1,
    backward: bool = True,
    memory: bool = True,
) -> Problem:
    """Draw a problem with colours, costs of any scale and, where asked, backward nodes and little memory."""
    random = Random(seed)
    forward = nodes - (nodes // 3 if backward else 0)
    scale = random.choice([0, 1, 5, 20])
    records = []
    for i in range(nodes):
        work = Fraction(random.randint(0, 40), 8)
        colour = random.randint(0, nodes // 2) if random.random() < 0.5 else None
        records.append(
            Node(
                name=f"n{i}",
                cpu_time=work * random.randint(1, 10),
                accelerator_time=None if cpus and random.random() < 0.08 else work,
                output_cost=Fraction(random.randint(0, 40) * scale, 80),
                size=Fraction(random.randint(0, 10)),
                colour=colour,
                backward=i >= forward,
            )
        )
    chance = random.choice([0.2, 0.4])
    edges = [(i, j) for i in range(nodes) for j in range(i + 1, nodes) if random.random() < chance]
    limit = sum(int(node.size) for node in records)
    limit = random.choice([limit, limit * 2 // 3, limit // 2]) if memory else limit
    return Problem(tuple(records), tuple(edges), accelerators, cpus, Fraction(limit))


def every_placement(problem: Problem) -> Iterator[NodePlacement]:
    """Yield a device for every colour, in all ways."""
    count = max(problem.colours) + 1
    for devices in product(range(problem.devices), repeat=count):
        yield NodePlacement(tuple(devices[colour] for colour in problem.colours))


def optimum(problem: Problem, *, contiguous: bool) -> Fraction | None:
    """Find the least greatest load by trying every placement; None where none is allowed."""
    allowed = (p for p in every_placement(problem) if not violations(problem, p, contiguous=contiguous))
    return min((greatest_load(problem, p) for p in allowed), default=None)


def has_order(problem: Problem, placement: NodePlacement) -> bool:
    """Whether some order of the devices has every edge between forward nodes lead forward: by trying all."""
    pairs = [
        (placement.device_of[a], placement.device_of[b])
        for a, b in problem.edges
        if not (problem.nodes[a].backward or problem.nodes[b].backward)
    ]
    ranks = (
        dict(zip(order, range(problem.devices), strict=True))
        for order in permutations(range(problem.devices))
    )
    return any(all(rank[a] <= rank[b] for a, b in pairs) for rank in ranks)
