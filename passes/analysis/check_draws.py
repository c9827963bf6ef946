"""Refuse draws that replicas would have to make for their own samples, where these cannot be told apart."""

from partc.passes.analysis.reachability import descendants
from partc.passes.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel


def check_draws(training: TrainingGraph) -> None:
    """Raise UnsupportedModel for a draw that is shaped like what each replica has its own of.

    With no sample axis, all replicas would draw the same numbers for different samples. (One batch for all
    needs no axis: there is one draw, as on one device.)
    """
    gradients = frozenset(t for g in training.gradients.values() for t in (g.dense, g.ids, g.rows) if t)
    own = (
        descendants(training.graph, training.varying_inputs(), gradients) - gradients
    )  # these are everybody's
    for drawn in training.drawn_inputs.values():
        if drawn.sample_axis is None and drawn.like in own:
            raise UnsupportedModel(
                f"random numbers are drawn like {drawn.like!r}, whose sample axis partc cannot find",
                at=f"draw {drawn.name!r} {list(drawn.shape)}",
                fix="compile with --batch global, or draw the numbers outside and feed them as a data input",
            )
