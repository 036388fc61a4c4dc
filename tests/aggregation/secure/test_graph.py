"""The graph: every site computes the same neighbours."""

from __future__ import annotations

import itertools
import random

import pytest

from cloister.aggregation.secure.graph import Graph
from cloister.protocol.errors import MemberError
from cloister.protocol.plan.threshold import Parameters, parameters


def names(n: int) -> list[str]:
    return [f"site-{i}" for i in range(n)]


@pytest.mark.parametrize("n", [2, 3, 64, 65, 100, 257])
def test_neighbours_are_mutual_regular_and_found_alike(n: int) -> None:
    found = parameters(n, n // 10, n // 10)
    shuffled = random.Random(n).sample(names(n), n)
    graph, again = Graph(names(n), found, b"k" * 32, 1), Graph(shuffled, found, b"k" * 32, 1)
    for site in names(n):
        assert graph.neighbours(site) == again.neighbours(site) == tuple(sorted(set(graph.neighbours(site))))
        assert len(graph.neighbours(site)) == found.k
        assert site not in graph.neighbours(site)
        assert all(site in graph.neighbours(other) for other in graph.neighbours(site))
        assert graph.holders(site) == tuple(sorted({*graph.neighbours(site), *([site] if n <= 64 else [])}))
    assert sorted(graph.index(site) for site in names(n)) == list(range(1, n + 1))


def connected(graph: Graph, left: set[str]) -> bool:
    reached, todo = set(), [min(left)]
    while todo:
        site = todo.pop()
        if site not in reached:
            reached.add(site)
            todo += [other for other in graph.neighbours(site) if other in left]
    return reached == left


def test_no_k_minus_1_sites_cut_the_graph_and_some_k_do() -> None:
    found = Parameters(70, 7, 7, 4, 4)
    graph = Graph(names(70), found, b"k", 1)
    draw = random.Random(0)
    for _ in range(300):
        assert connected(graph, set(names(70)) - set(draw.sample(names(70), 3)))
    cut = set(graph.neighbours("site-0"))
    assert not connected(graph, set(names(70)) - cut)


def test_the_order_depends_on_round_and_roster_only() -> None:
    found = parameters(100, 10, 10)
    orders = [
        Graph(names(100), found, key, round_) for key, round_ in itertools.product((b"a", b"b"), (1, 2))
    ]
    assert len({graph.neighbours("site-0") for graph in orders}) == 4


def test_a_cohort_of_another_size_is_refused() -> None:
    with pytest.raises(MemberError):
        Graph(["a", "b"], parameters(3, 0, 0), b"k", 1)
    with pytest.raises(MemberError):
        Graph(["a", "b", "b"], parameters(3, 0, 0), b"k", 1)
