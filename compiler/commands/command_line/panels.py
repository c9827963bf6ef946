"""The groups in which options stand in help: one heading for one kind of option, in every command."""

STEP = "The training step"
CLUSTER = "The cluster"
STRATEGY = "The strategy"
GRADIENTS = "Gradients"
LIMITS = "Memory and precision"
OUTPUT = "The output"

OPTIMIZER = "The optimizer"
TRAINED = "What is trained"

DATA = "The data"
CHECKPOINTS = "Checkpoints"
FAULTS = "When something goes wrong"
WATCHED = "What is watched"
