"""Which cores a rank gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpt_fast.parallel import cores
from gpt_fast.parallel.cores import bind, by_node, cores_of, numbers

TWO_SOCKETS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("count", "nodes", "wanted"),
    [
        (2, TWO_SOCKETS, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, TWO_SOCKETS, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (2, [[0, 1], [2, 3], [4, 5], [6, 7]], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (3, TWO_SOCKETS, [{0, 1}, {2, 3}, {4, 5}]),
        (2, [[0, 1]], [{0}, {1}]),
        (4, [[0, 1]], [set(), set(), set(), set()]),
    ],
)
def test_ranks_share_the_cores(count: int, nodes: list[list[int]], wanted: list[set[int]]) -> None:
    assert [cores_of(rank, count, nodes) for rank in range(count)] == wanted


def test_nodes_are_read(tmp_path: Path) -> None:
    for node, text in enumerate(["0-3,8\n", "4-7\n", "\n"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert numbers("0-3,8\n") == {0, 1, 2, 3, 8}
    assert by_node({0, 1, 2, 3, 8, 4, 5, 6, 7}, tmp_path) == [[0, 1, 2, 3, 8], [4, 5, 6, 7]]
    assert by_node({1, 4, 5}, tmp_path) == [[1], [4, 5]]
    assert by_node({1, 99}, tmp_path) == [[1, 99]]  # a node that Linux does not list: all of them, in order


@pytest.mark.parametrize(
    ("nodes", "asked", "wanted"),
    [
        (TWO_SOCKETS, "1", (4, {4, 5, 6, 7})),  # what torchrun says is no wish
        (TWO_SOCKETS, "6", (3, {4, 5, 6, 7})),
        (TWO_SOCKETS, "64", (4, {4, 5, 6, 7})),
        (TWO_SOCKETS, "6,2", (4, {4, 5, 6, 7})),
        ([[0, 1, 2, 3]], "1", (2, None)),  # one node: Linux moves threads as it likes
        ([[0]], "8", (1, None)),
    ],
)
def test_a_rank_keeps_to_its_node(
    nodes: list[list[int]], asked: str, wanted: tuple[int, set[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, set[int]]] = []
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {core for node in nodes for core in node}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, share: bound.append((pid, share)), raising=False)
    monkeypatch.setattr(cores, "by_node", lambda usable: [node for node in nodes if usable.issuperset(node)])
    threads, share = wanted
    assert bind(1, 2) == threads
    assert bound == ([] if share is None else [(0, share)])
