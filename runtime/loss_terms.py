"""What the loss is made of: needed to tell which rank spoilt a loss that all ranks share."""

from partc.runtime.program import Plan, Run, Start


def loss_terms(plan: Plan) -> frozenset[str]:
    """Return the values that each rank contributes to the loss, as they are before ranks meet.

    A reduced loss is not finite on any rank as soon as one rank's term is not. The search goes back
    from the loss through communications, through what is computed of reduced scalars, and through
    values that lie in one place.
    """
    terms = {output.value for output in plan.outputs if output.name == plan.loss}
    places = {piece.value: (piece.buffer, piece.offset) for piece in plan.slices}
    reduced = _reduced_scalars(plan)
    for instruction in reversed(plan.instructions):
        match instruction:
            case Start(reads=reads, writes=writes):
                terms |= {read for read, write in zip(reads, writes, strict=False) if write in terms}
            case Run(reads=reads, writes=writes) if any(value in terms for _, value in writes):
                if origins := {value for _, value in reads} & reduced:
                    terms = terms - {value for _, value in writes} | origins
        taken = {places[term] for term in terms if term in places}
        terms |= {value for value, place in places.items() if place in taken}
    return frozenset(terms)


def _reduced_scalars(plan: Plan) -> set[str]:
    written = {write for start in plan.instructions if isinstance(start, Start) for write in start.writes}
    return {
        piece.value
        for piece in plan.slices
        if all(size == 1 for size in piece.shape) and {piece.value, piece.buffer} & written
    }
