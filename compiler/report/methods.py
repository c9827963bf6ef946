"""The ways to synchronise a variable: their names, and what they mean to someone new to them."""

from dataclasses import dataclass

from partc.cost.assignment.search_strategy import DATA_PARALLEL

NAMES = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGatherv",
    "servers": "Servers",
    "replicated": "No exchange",
}

SPOKEN = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGatherv",
    "servers": "the way through the servers",
}

OUTCOMES = {
    "all_reduce": "is summed by AllReduce",
    "all_gather": "is exchanged by AllGatherv",
    "servers": "went to the servers",
}

ALONE = "this plan"  # which no other was compared with

CANDIDATES = {
    "busiest link": "what keeps the busiest link busy for the shortest time, by an integer program",
    "everything AllReduced": "AllReduce for everything, rows never touched included",
    "allreduce": "AllReduce for dense, AllGatherv for sparse parameters",
    "ps": "servers for everything",
    "hybrid": "servers for sparse, AllReduce for dense parameters",
    "improved": "the quickest of the others, then changed parameter by parameter while that made it quicker",
    DATA_PARALLEL: "replicas of the whole step, on every worker one",
    ALONE: "the strategy that was given, or all there is",
}

_WORDS = {
    "data": "replicas",
    "tensor": "workers of a replica share weights, and the operators that read them",
    "spatial": "workers of a replica share the rows of images",
    "fsdp": "replicas keep parts of the variables, and gather what they read",
    "pipeline": "layers follow each other in stages, for one micro-batch after the other",
    "microbatches": "each replica\u2019s batch passes in parts, whose gradients are summed",
    "workers": "so many workers are the replicas, and the others idle",
    "layerwise": "replicas are hosts, layers are divided among a host\u2019s devices",
    "one-weird-trick": "replicas divide samples of convolutions, and columns of dense layers",
}


def meaning_of(strategy: str) -> str:
    """Return what a strategy that was compared is, in words: one of `CANDIDATES`, or a name's words."""
    if strategy in CANDIDATES:
        return CANDIDATES[strategy]
    return "; ".join(_WORDS[word.partition("=")[0]] for word in strategy.split(","))


@dataclass(frozen=True, slots=True)
class Explanation:
    """One method in two sentences."""

    method: str
    name: str
    text: str


EXPLANATIONS = (
    Explanation(
        "all_reduce",
        NAMES["all_reduce"],
        "Every worker keeps a full copy of the variable, and all of them together add up their whole "
        "gradients until each holds the sum. What a host sends hardly grows with the number of hosts, but "
        "all of the variable travels, zeros included.",
    ),
    Explanation(
        "all_gather",
        NAMES["all_gather"],
        "Every worker keeps a full copy, and sends just the rows that its own samples touched to every "
        "other worker. Little travels while there are few workers, but each must receive the rows of all "
        "the others.",
    ),
    Explanation(
        "servers",
        NAMES["servers"],
        "The hosts\u2019 servers own the variable, a large one cut into shards; workers fetch the rows they "
        "need and return gradients for those rows only. A host asks once for what several of its workers "
        "need, and no worker ever holds the whole of a sparse variable.",
    ),
)


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a colour of the timeline means."""

    kind: str
    name: str


KEYS = (
    LegendEntry("compute", "computing"),
    LegendEntry("all_reduce", "AllReduce"),
    LegendEntry("all_gather", "AllGather(v), ReduceScatter"),
    LegendEntry("servers", "to and from servers"),
    LegendEntry("transfer", "between stages, operators\u2019 devices and neighbours"),
)

_METHODS = {
    "AllReduce": "all_reduce",
    "AllGatherRows": "all_gather",
    "AllGather": "all_gather",
    "ReduceScatter": "all_gather",
    "ShiftAhead": "transfer",
    "ShiftBack": "transfer",
    "ToStage": "transfer",
    "RowsToStage": "transfer",
    "Exchange": "transfer",
}


def method_of_label(label: str) -> str:
    """Return the method that a communication serves, from the word its label starts with."""
    operation = label.partition(" ")[0]
    return _METHODS.get(operation, "servers")
