"""All models of the zoo, by name."""

from tests.peers.zoo import vision_libraries  # noqa: F401  # isort: skip  # before anything looks for torchvision
from tests.peers.zoo import graphs, images, modules, recurrent, representations, texts, vision

FAMILIES = (texts, images, vision, recurrent, graphs, representations, modules)
MODELS = {model.name: model for family in FAMILIES for model in family.MODELS}
