"""Networks on graphs, and recommenders: rows gathered, scattered and summed by ids."""

import torch
from torch import nn
from torch.nn import functional

from tests.peers.zoo.model import BATCH, Draw, Model, integers, normal, uniform

NODES, EDGES, CLASSES = 9, 20, 5
ITEMS, USERS = 50, 40


def edges(generator: torch.Generator) -> torch.Tensor:
    """Draw the ends int64[2, edges] of a graph's edges, its nodes those of the whole batch."""
    return torch.randint(0, BATCH, (2, EDGES), generator=generator)


class Convolution(nn.Module):
    """A graph convolution on one graph: messages summed into nodes by index_add, divided by their degree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(_mean_of_neighbours(torch.relu(self.first(_mean_of_neighbours(x, edges))), edges))


def _mean_of_neighbours(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    source, target = edges[0], edges[1]
    summed = torch.zeros_like(x).index_add(0, target, x[source])
    degree = torch.ones(x.shape[0]).index_add(0, target, torch.ones(EDGES))
    return (x + summed) / degree[:, None]


class ManyGraphs(nn.Module):
    """A graph a sample, of equal size: dense adjacency, messages by matrix products, pooled by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        weights = adjacency / adjacency.sum(-1, keepdim=True)
        hidden = torch.relu(self.second(weights @ torch.relu(self.first(weights @ x))))
        return self.out(hidden.mean(1))


class AttentionOnEdges(nn.Module):
    """A graph attention layer: softmax over each node's edges, by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score, self.out = nn.Linear(8, 16), nn.Linear(32, 1), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        hidden = self.project(x)
        score = functional.leaky_relu(self.score(torch.cat([hidden[source], hidden[target]], 1)))[:, 0]
        weight = torch.exp(score - score.max())
        total = torch.zeros(x.shape[0]).index_add(0, target, weight) + 1e-6
        message = hidden[source] * (weight / total[target])[:, None]
        return self.out(torch.zeros_like(hidden).index_add(0, target, message) + hidden)


class PooledMolecules(nn.Module):
    """Atoms of several molecules in one axis; scatter_add pools those of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, atoms: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(self.embedding(atoms)))  # [batch, nodes, 16]
        owner = (atoms > 3).to(torch.int64)[:, :, None].expand(-1, -1, 16)
        pooled = torch.zeros(atoms.shape[0], 2, 16).scatter_add(1, owner, hidden)
        return functional.mse_loss(self.out(pooled[:, 0] - pooled[:, 1])[:, 0], targets)


class DeepRecommender(nn.Module):
    """DLRM: tables of categories, a network of numbers, their pairwise products, a click's probability."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 8) for rows in (ITEMS, USERS, 10))
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(4, 4, -1)
        score = self.top(torch.cat([dense, products[:, row, column]], 1))[:, 0]
        return functional.binary_cross_entropy_with_logits(score, clicked)


class Bags(nn.Module):
    """EmbeddingBag over equal bags, by mean or sum."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(ITEMS, 8, mode=mode), nn.Linear(8, CLASSES)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(items))


class TwoTowers(nn.Module):
    """Users and items in one space; every other item of the batch is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.user_tower, self.item_tower = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        users = functional.normalize(self.user_tower(self.users(user)))
        items = functional.normalize(self.item_tower(self.items(item)))
        return functional.cross_entropy(users @ items.T / 0.1, torch.arange(user.shape[0]))


class Factorisation(nn.Module):
    """Matrix factorisation: biases of users and items, and a mean of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.5))

    def forward(self, user: torch.Tensor, item: torch.Tensor, rating: torch.Tensor) -> torch.Tensor:
        score = (self.users(user) * self.items(item)).sum(-1) + self.mean
        score = score + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]
        return functional.mse_loss(score, rating)


class WideAndDeep(nn.Module):
    """A linear model over one hot features beside a deep one over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.table = nn.Linear(ITEMS, 1), nn.Embedding(ITEMS, 8)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, items: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        hot = functional.one_hot(items, ITEMS).sum(1).to(torch.float32)
        score = self.wide(hot) + self.deep(self.table(items).flatten(1))
        return functional.binary_cross_entropy_with_logits(score[:, 0], clicked)


def clicks(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (BATCH,), generator=generator).to(torch.float32)


GRAPHS, RECOMMENDERS, ENTROPY = "graph networks", "recommendation", "softmax_cross_entropy"
nodes: Draw = normal(8)
MODELS = [
    Model("graph_convolution", GRAPHS, Convolution, {"x": nodes, "edges": edges}, ENTROPY, {"edges": None}),
    Model(
        "graphs_dense",
        GRAPHS,
        ManyGraphs,
        {"x": normal(NODES, 8), "adjacency": uniform(NODES, NODES)},
        ENTROPY,
    ),
    Model(
        "graph_attention", GRAPHS, AttentionOnEdges, {"x": nodes, "edges": edges}, ENTROPY, {"edges": None}
    ),
    Model("molecules", GRAPHS, PooledMolecules, {"atoms": integers(9, NODES), "targets": normal()}),
    Model(
        "dlrm",
        RECOMMENDERS,
        DeepRecommender,
        {"numbers": normal(13), "ids": integers(10, 3), "clicked": clicks},
    ),
    Model("embedding_bag_mean", RECOMMENDERS, lambda: Bags("mean"), {"items": integers(ITEMS, 6)}, ENTROPY),
    Model("embedding_bag_sum", RECOMMENDERS, lambda: Bags("sum"), {"items": integers(ITEMS, 6)}, ENTROPY),
    Model("two_towers", RECOMMENDERS, TwoTowers, {"user": integers(USERS), "item": integers(ITEMS)}),
    Model(
        "factorisation",
        RECOMMENDERS,
        Factorisation,
        {"user": integers(USERS), "item": integers(ITEMS), "rating": normal()},
    ),
    Model("wide_and_deep", RECOMMENDERS, WideAndDeep, {"items": integers(ITEMS, 3), "clicked": clicks}),
]
