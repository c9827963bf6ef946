"""Choose which float tensors are trained; the others stay constants of the graph.

An exported graph keeps masks, rotary tables and position tables among its initializers, where they look
like weights. What tells them apart is in choice/; what nothing tells, --train and --freeze must.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from shlex import quote

import onnx

from partc.compiler.differentiation.parameters.decision import ParameterDecision, Verdict, constant, trained
from partc.compiler.differentiation.parameters.dropped import Dropped
from partc.compiler.differentiation.parameters.exporter_facts import FOLDED_BY_TORCHSCRIPT, UNOPTIMISED
from partc.compiler.report.units import first_words
from partc.passes.graph.operation_builder import RANDOM_OPS
from partc.runtime.errors import BadUsage, UnsupportedModel, some_of

MAX_NAMES = 8  # of a group that a message lists


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """Patterns of names (`*`, `?`, `[a-z]`): what is trained (None: all parameters), less what is frozen.

    What is frozen is a constant of the step: it gets no gradient, no slots and no next value. A pattern of
    `train` fits parameters and what may be one; a constant is trained where its full name stands there.
    """

    train: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()

    def named_as(self, names: Mapping[str, str]) -> "ParameterChoice":
        """Return the choice by other names: `names` has those of the file -> those of the parameters."""

        def renamed(patterns: Iterable[str]) -> tuple[str, ...]:
            return tuple(names.get(pattern, pattern) for pattern in patterns)

        return ParameterChoice(None if self.train is None else renamed(self.train), renamed(self.freeze))

    def without(self, dropped: Dropped, names: Collection[str]) -> "ParameterChoice":
        """Return the choice among `names`, those of the file's parameters, of which some are gone.

        Raises UnsupportedModel where a parameter is to be trained that the file may not have, or not whole.
        """
        tied = {name: others for name, others in dropped.stand_ins.items() if self.may_train(name)}
        if tied:
            raise _refusal_of_tied(tied, set(names).difference(tied))
        chosen = [name for name in (*dropped.parameters, *dropped.numbers) if self.may_train(name)]
        if chosen:
            raise _refusal_of_dropped(dropped, chosen, set(names).difference(chosen))
        merged = (name for others in dropped.stand_ins.values() for name in others)
        absent = [*dropped.parameters, *dropped.silent, *merged]

        def fits_absent_alone(pattern: str) -> bool:
            return any(fits(name, (pattern,)) for name in absent) and not any(
                fits(name, (pattern,)) for name in names
            )

        return replace(self, freeze=tuple(p for p in self.freeze if not fits_absent_alone(p)))

    def may_train(self, name: str) -> bool:
        """Tell whether the choice leaves a parameter of this name to be trained."""
        return not fits(name, self.freeze) and (self.train is None or fits(name, self.train))

    def choose(
        self, decisions: Mapping[str, ParameterDecision], names: Sequence[str], declared: Collection[str]
    ) -> dict[str, ParameterDecision]:
        """Return what is trained and what is constant, and why. Raises BadUsage where something is neither.

        `decisions`: what the file tells of the tensors that move the loss. `names` are of all that could be
        trained. Where the model declares its parameters, nothing else is trained unless `train` names it.
        """
        check_fit("--freeze", self.freeze, names)
        check_fit("--train", self.train or (), names)
        check_fit("--train", self.train or (), list(decisions), " that the loss depends on")
        self._check_patterns(decisions)
        choices = {name: self._choose_one(name, decisions[name], declared) for name in decisions}
        if undecided_names := {name: d for name, d in choices.items() if d.verdict is Verdict.UNDECIDED}:
            raise _refusal(undecided_names, choices.keys() - undecided_names.keys())
        if choices and not any(d.verdict is Verdict.TRAINED for d in choices.values()):
            raise _nothing_trained(decisions)
        return choices

    def _choose_one(
        self, name: str, decision: ParameterDecision, declared: Collection[str]
    ) -> ParameterDecision:
        if fits(name, self.freeze):
            return constant("frozen by --freeze")
        if self.train is None and declared:
            return (
                trained("declared by the model") if name in declared else constant("not declared a parameter")
            )
        if self.train is None:
            return decision
        is_constant = decision.verdict is Verdict.CONSTANT and name not in declared
        if name in self.train or (fits(name, self.train) and not is_constant):
            is_told = decision.verdict is Verdict.TRAINED
            return decision if is_told else trained("chosen by --train", decision.source)
        return decision if is_constant else constant("not among what --train names")

    def _check_patterns(self, decisions: Mapping[str, ParameterDecision]) -> None:
        """Raise BadUsage for a pattern of `train` that fits nothing but constants."""
        for pattern in self.train or ():
            matching_names = [name for name in decisions if fits(name, (pattern,))]
            constants = [name for name in matching_names if decisions[name].verdict is Verdict.CONSTANT]
            if pattern not in decisions and matching_names == constants:
                raise BadUsage(
                    f"{pattern!r} fits constants alone: {first_words(constants, MAX_NAMES)}",
                    at=f"--train: {decisions[constants[0]].reason}",
                    fix=f"train one by its full name, as --train {quote(pattern_of(constants[0]))}",
                )


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name is, or fits, one of the patterns."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def check_fit(option: str, patterns: Iterable[str], names: Sequence[str], which: str = "") -> None:
    """Raise BadUsage for a pattern that no name fits."""
    for pattern in patterns:
        if not any(fits(name, (pattern,)) for name in names):
            raise BadUsage(
                f"no parameter{which} has a name that fits {pattern!r}",
                at=option,
                fix=f"use patterns for some of {some_of(sorted(map(pattern_of, names)))}",
            )


def check_kept(graph: onnx.GraphProto, constants: Collection[str]) -> None:
    """Raise BadUsage for a frozen tensor that the graph would draw anew at every step."""
    for node in graph.node:
        if node.op_type in RANDOM_OPS and set(constants).intersection(node.output):
            raise BadUsage(
                f"{node.output[0]!r} would be drawn anew at every step: only a variable keeps what it drew",
                at=f"node {node.name!r}, left out by --train or --freeze",
                fix="train it too, or write the model with its values as an initializer",
            )


def pattern_of(name: str) -> str:
    """Return a pattern that fits this name, where commas separate patterns."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name).replace(",", "?")


def patterns_for(names: Collection[str], others: Collection[str]) -> list[str]:
    """Return few patterns that fit all the names and none of the others."""
    patterns: list[str] = []
    for name in names:
        if fits(name, patterns):
            continue
        wide = re.sub(r"\d+", "*", pattern_of(name))
        is_safe = not any(fits(other, (wide,)) for other in others)
        patterns.append(wide if is_safe else pattern_of(name))
    return patterns


def _refusal(waiting: Mapping[str, ParameterDecision], others: Collection[str]) -> BadUsage:
    """Return the error that lists what is undecided, by reason, and the options that decide it."""
    frozen = quote(",".join(patterns_for(waiting, others)))
    fix = f"--freeze {frozen} keeps all as they are, --train '*' trains all, both together choose among them"
    if any(decision.source for decision in waiting.values()):
        fix += ";\n       or export with optimize=False, which folds no parameter"
    if any(name.startswith(FOLDED_BY_TORCHSCRIPT) for name in waiting):
        fix += ";\n       or export with do_constant_folding=False, which folds no parameter"
    count = len(waiting)
    return BadUsage(
        f"nothing in the file tells whether {count} tensor{'s are' if count > 1 else ' is'} trained",
        at=_by_reason(waiting),
        fix=fix,
    )


def _refusal_of_tied(stand_ins: Mapping[str, Collection[str]], others: Collection[str]) -> UnsupportedModel:
    """Return the error of initializers that stand for parameters of several modules."""
    places = [f"{name}: also {first_words(list(merged), MAX_NAMES)}" for name, merged in stand_ins.items()]
    frozen = quote(",".join(patterns_for(stand_ins, others)))
    return UnsupportedModel(
        "the exporter stored one tensor for parameters that were equal: trained, they would be tied",
        at="\n       ".join(places),
        fix=f"{UNOPTIMISED}; or add --freeze {frozen} if these are not to be trained",
    )


def _refusal_of_dropped(
    dropped: Dropped, chosen: Collection[str], others: Collection[str]
) -> UnsupportedModel:
    """Return the error of parameters that operations which are gone may have read."""
    frozen = quote(",".join(patterns_for(chosen, others)))
    gone = [name for name in dropped.parameters if name in chosen]
    kept = [name for name in dropped.numbers if name in chosen]
    places = [
        f"{what}: {first_words(names, MAX_NAMES)}"
        for what, names in (
            ("parameters without values in the file", gone),
            ("parameters that may have been read more often, or parts of such", kept),
        )
        if names
    ]
    freeze = f"add --freeze {frozen} if the module does not use these, or they are not to be trained"
    return UnsupportedModel(
        "the exporter's optimiser dropped operations that may have read parameters, as it drops x * 1, "
        f"x + 0 and biases of zeros: {first_words(dropped.operations, MAX_NAMES)}",
        at="\n       ".join(places),
        fix=f"{freeze}; else {UNOPTIMISED}" if gone else f"{UNOPTIMISED}; or {freeze}",
    )


def _nothing_trained(decisions: Mapping[str, ParameterDecision]) -> BadUsage:
    """Return the error of a choice that leaves nothing to train."""
    possible = [name for name, decision in decisions.items() if decision.verdict is not Verdict.CONSTANT]
    if possible:
        return BadUsage(
            "every parameter is frozen",
            at="--freeze",
            fix=f"leave some of {some_of(sorted(possible))} to train",
        )
    return BadUsage(
        "the loss depends on constants alone",
        at=_by_reason(decisions),
        fix=f"train one by its full name, as --train {quote(pattern_of(min(decisions)))}, "
        "or choose another loss",
    )


def _by_reason(decisions: Mapping[str, ParameterDecision]) -> str:
    """List names behind the reasons that they have."""
    by_reason: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        origin = f" (of {decision.source})" if decision.source else ""
        by_reason.setdefault(decision.reason, []).append(name + origin)
    return "\n       ".join(
        f"{reason}: {first_words(names, MAX_NAMES)}" for reason, names in by_reason.items()
    )
