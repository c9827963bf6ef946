"""Why nothing fits: a smallest set of nodes that conflicts, and the smallest changes after which everything
fits.

Only memory can conflict, and only where there is no CPU, whose memory has no limit. Without an order of
parts, the m largest groups fit nowhere as soon as any m groups do: the smallest conflict is found by their
number alone (CP-SAT packs them). With contiguous parts the order may conflict too: then groups are left
out one by one while what remains still conflicts.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from ortools.sat.python import cp_model

from partc.cost.new_solver import new_solver
from partc.cost.placement.problems.groups import NEVER, Groups, Ints, group_nodes, without_groups
from partc.cost.placement.problems.problem import NodePlacement, Problem
from partc.cost.placement.throughput.chains import best_chain
from partc.runtime.errors import NoPlacement

MOST_MORE = 4096


@dataclass(frozen=True)
class Conflict:
    """`nodes` cannot be placed together; each change alone lets everything fit (None: it does not).

    `smallest`: no set of fewer groups of nodes conflicts; else none of its groups can be left out.
    """

    nodes: tuple[int, ...]
    smallest: bool
    least_memory: Fraction | None
    least_accelerators: int | None


def find_conflict(problem: Problem, *, contiguous: bool, seconds: float = 20.0) -> Conflict | None:
    """Say why no placement is allowed, or None where memory does not forbid one."""
    if problem.cpus:
        return None
    groups = group_nodes(problem, contiguous=contiguous)
    for group in range(groups.count):
        if groups.work[group] >= NEVER:
            return Conflict(groups.members[group], True, None, None)
    packing = _Packing.of(groups, contiguous, time.monotonic() + seconds)
    everything = tuple(range(groups.count))
    if packing.fits(everything):
        return None
    chosen, smallest = packing.smallest_conflict()
    nodes = tuple(sorted(node for group in chosen for node in groups.members[group]))
    accelerators = packing.least_accelerators()
    return Conflict(nodes, smallest, packing.least_memory(everything), accelerators)


def pack(problem: Problem, seconds: float = 20.0) -> NodePlacement | None:
    """Return a placement that memory allows, in no order of parts; None where none was found."""
    groups = group_nodes(problem, contiguous=False)
    packing = _Packing.of(groups, False, time.monotonic() + seconds)
    if problem.cpus or max(groups.work, default=0) >= NEVER:
        return None
    _, devices = packing.pack(tuple(range(groups.count)))
    return None if devices is None else groups.placement(devices)


def refuse(problem: Problem, *, contiguous: bool) -> NoPlacement:
    """Make the error for a problem without an answer, with its conflict where there is one."""
    conflict = find_conflict(problem, contiguous=contiguous)
    kind = "contiguous placement" if contiguous else "placement"
    if conflict is None:
        return NoPlacement(
            f"no {kind} was found in time", at="accelerators and memory", fix="give more seconds"
        )
    names = [problem.nodes[node].name for node in conflict.nodes]
    size = sum(problem.nodes[node].size for node in conflict.nodes)
    what = f"no {kind} exists: {len(names)} nodes of size {float(size):g} conflict on "
    what += f"{problem.accelerators} accelerators of memory {float(problem.accelerator_memory):g}"
    changes = []
    if conflict.least_memory is not None:
        changes.append(f"accelerators of memory {float(conflict.least_memory):g}")
    if conflict.least_accelerators is not None:
        changes.append(f"{conflict.least_accelerators} accelerators")
    fix = "give " + ", or ".join([*changes, "a CPU"])
    return NoPlacement(
        what, at="nodes " + ", ".join(f"'{n}'" for n in names[:8]) + (" ..." if names[8:] else ""), fix=fix
    )


@dataclass
class _Packing:
    """Sizes as whole numbers of 1 / `scale`."""

    groups: Groups
    sizes: Ints
    scale: int
    contiguous: bool
    deadline_s: float

    @classmethod
    def of(cls, groups: Groups, contiguous: bool, deadline_s: float) -> "_Packing":
        nodes = groups.problem.nodes
        scale = math.lcm(*(node.size.denominator for node in nodes))
        sizes = [int(sum(nodes[n].size for n in members) * scale) for members in groups.members]
        return cls(groups, np.array(sizes, np.int64), scale, contiguous, deadline_s)

    @property
    def memory(self) -> int:
        return int(self.groups.problem.accelerator_memory * self.scale)

    def fits(self, chosen: Sequence[int]) -> bool:
        if not self.contiguous:
            return self.pack(chosen)[0]
        least = self._least(chosen, self.groups.problem.accelerators)
        return least is not None and least <= self.memory

    def least_memory(self, chosen: Sequence[int]) -> Fraction | None:
        least = self._least(chosen, self.groups.problem.accelerators)
        return None if least is None else Fraction(least, self.scale)

    def pack(self, chosen: Sequence[int]) -> tuple[bool, list[int] | None]:
        """Whether memory may allow the chosen groups, and a device of each where one was found."""
        memories = [int(memory * self.scale) for memory in self.groups.problem.memories]
        model = cp_model.CpModel()
        are_alike = len(set(memories)) <= 1
        x = _place_each(model, len(chosen), len(memories), are_alike)
        for device, memory in enumerate(memories):
            held = sum(int(self.sizes[g]) * row[device] for g, row in zip(chosen, x, strict=True))
            model.add(held <= memory)
        solver = new_solver(workers=2)
        solver.parameters.max_time_in_seconds = max(0.1, self.deadline_s - time.monotonic())
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return status != cp_model.INFEASIBLE, None
        return True, [next(d for d, var in enumerate(row) if solver.boolean_value(var)) for row in x]

    def least_accelerators(self) -> int | None:
        """The fewest accelerators of today's memory, or None where one group alone exceeds it.

        None, too, where accelerators differ in memory: it is not told which there are more of.
        """
        if self.groups.problem.own_memory or int(self.sizes.max(initial=0)) > self.memory:
            return None
        everything = tuple(range(self.groups.count))
        low = max(self.groups.problem.accelerators, -(-int(self.sizes.sum()) // max(self.memory, 1)))
        for count in range(low, min(low + MOST_MORE, len(everything)) + 1):
            least = self._least(everything, count)
            if least is not None and least <= self.memory:
                return count
        return None

    def smallest_conflict(self) -> tuple[tuple[int, ...], bool]:
        """A conflicting set of groups, and whether none is smaller."""
        largest = sorted(range(self.groups.count), key=lambda g: (-int(self.sizes[g]), g))
        unordered = replace(self, contiguous=False)
        if not unordered.fits(largest):
            low, high = 0, len(largest)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if unordered.fits(largest[:middle]) else (low, middle)
            # An order may conflict with fewer groups still; then this set is merely a conflict.
            return tuple(sorted(largest[:high])), not self.contiguous
        chosen = list(range(self.groups.count))
        for group in reversed(largest):
            rest = [g for g in chosen if g != group]
            if not self.fits(rest):
                chosen = rest
        return tuple(chosen), False

    def _least(self, chosen: Sequence[int], accelerators: int) -> int | None:
        """The least memory with which the chosen groups fit on so many accelerators; None: not found."""
        if not chosen:
            return 0
        if accelerators == 0:
            return None
        return (
            self._least_ordered(chosen, accelerators)
            if self.contiguous
            else self._least_free(chosen, accelerators)
        )

    def _least_ordered(self, chosen: Sequence[int], accelerators: int) -> int | None:
        none = np.zeros(self.groups.count, np.int64)
        problem = replace(self.groups.problem, accelerators=accelerators)
        sized = replace(
            self.groups, problem=problem, work=self.sizes, size=none, cpu=none, families=(), costs=none[:0],
            forward=(True,) * self.groups.count,
        )  # fmt: skip
        thin = without_groups(sized, frozenset(range(self.groups.count)) - set(chosen))
        chain = best_chain(thin, int(self.sizes.sum()) + 1, deadline_s=self.deadline_s)
        return chain.value

    def _least_free(self, chosen: Sequence[int], accelerators: int) -> int | None:
        sizes = [int(self.sizes[g]) for g in chosen]
        model = cp_model.CpModel()
        most = model.new_int_var(max(sizes), sum(sizes), "most")
        x = _place_each(model, len(chosen), accelerators, True)
        for device in range(accelerators):
            model.add(sum(size * row[device] for size, row in zip(sizes, x, strict=True)) <= most)
        model.minimize(most)
        solver = new_solver(workers=2)
        solver.parameters.max_time_in_seconds = max(0.1, self.deadline_s - time.monotonic())
        return int(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


def _place_each(
    model: cp_model.CpModel, groups: int, devices: int, are_alike: bool
) -> list[list[cp_model.IntVar]]:
    """Give each group one device. `are_alike`: of answers that differ by a swap of devices, leave one."""
    x = [[model.new_bool_var("") for _ in range(devices)] for _ in range(groups)]
    for i, row in enumerate(x):
        model.add_exactly_one(row)
        for later in row[i + 1 :] if are_alike else ():
            model.add(later == 0)
    return x
