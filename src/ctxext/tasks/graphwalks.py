"""Graph walks: breadth-first search and parent look-up in a list of edges."""

import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from typing_extensions import override

from ctxext.data.prompt import Pieces, Prompt, QuestionText
from ctxext.tasks.base import RetrievalTask

OPENING = """You will be given a graph as a list of directed edges. All nodes are at least degree 1. \
You will also get a description of an operation to perform on the graph.
Your job is to execute the operation on the graph and return the set of nodes that the operation results in. \
If asked for a breadth-first search (BFS), only return the nodes that are both reachable and exactly at that depth \
(not nodes at intermediate depths), and do not return the starting node. If asked for the parents of a node, only \
return the nodes that have an edge leading to the given node, do not return the given node itself.

Here is an example:
<begin example>
The graph has the following edges:
uvwx -> alke
abcd -> uvwx
abcd -> efgh
efgh -> uvwx

Example 1:
Operation:
Perform a BFS from node abcd with depth 1.
Final Answer: [uvwx, efgh]

Example 2:
Operation:
Perform a BFS from node alke with depth 1.
Final Answer: []

Example 3:
Operation:
Find the parents of node uvwx.
Final Answer: [abcd, efgh]
<end example>

Here is the graph to operate on:
The graph has the following edges:
"""
_ANSWER = "Final Answer:"
_LIST = re.compile(r"\[.*\]")
_NAME_BITS = 40
_REASON = "You may reason step by step."
_FREELY = f"""
Return your final answer as a list of nodes in the very last line of your response, \
for example:
{_ANSWER} [node1, node2, node3]
If the operation returns the empty set, the last line is:
{_ANSWER} []
"""

Edge = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class GraphWalks(RetrievalTask):
    """Return the nodes at a distance from a node, or the parents of a node.

    OpenAI's GraphWalks, https://huggingface.co/datasets/openai/graphwalks (MIT), as corrected in 2026: nodes at
    exactly the depth, and no node is its own parent. Graphs are random, with edges in random order. The edges that
    determine the answer are spread over the whole list. The others begin at other nodes and never change the answer.
    The prompt ends with the beginning of the answer's line, unless the model may reason before it.

    Attributes:
        max_depth: Maximum depth of a breadth-first search; half of the questions are searches.
        max_nodes: Maximum number of parents, and of edges from a node of a search.
    """

    name: str = "graphwalks"
    description: str = (
        "The text is the list of edges of a graph. The answer is the set of nodes at an exact distance from a node, or "
        "of its parents. The score is the F1 of the generated set."
    )
    shows: str = "following edges through a long list"
    options: tuple[str, ...] = ("repeat_question",)
    is_written: bool = True
    answer_room: int = 96
    is_chat: bool = True
    reasons_in_text: bool = True
    has_depths: bool = False
    max_depth: int = 2
    max_nodes: int = 3

    @property
    def is_free(self) -> bool:
        """Whether the model may write before its answer."""
        return self.form.is_chat or self.form.reasons

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        root = _draw_name(rng)
        if rng.random() < 0.5:
            depth = rng.randint(1, self.max_depth)
            edges, answer = self._draw_search(root, depth, rng)
            closed = {start for start, _ in edges}  # No other edge may begin there.
            operation = f"Perform a BFS from node {root} with depth {depth}."
            others = _draw_edges(random.Random(rng.getrandbits(64)), targets=sorted({*closed, *answer}))
        else:
            answer = {_draw_name(rng) for _ in range(rng.randint(1, self.max_nodes))}
            edges = [*((parent, root) for parent in sorted(answer)), (root, root), (root, _draw_name(rng))]
            operation = f"Find the parents of node {root}."
            others = _draw_edges(random.Random(rng.getrandbits(64)), targets=sorted(answer))
        rng.shuffle(edges)
        listed = sorted(answer)
        end, begin = (_FREELY, _ANSWER) if self.is_free else (_ANSWER, "")
        end = end.replace("\n", f"\n{_REASON} ", 1) if self.form.reasons else end
        question, line = f"\nOperation:\n{operation}\n{end}", f"{begin} [{', '.join(listed)}]"
        return Pieces(
            opening=OPENING,
            haystack=map(_format_line, others),
            needles=tuple(map(_format_line, edges)),
            questions=(QuestionText(question, line, required=tuple(listed)),),
            padding="\n",
        )

    def _draw_search(self, root: str, depth: int, rng: random.Random) -> tuple[list[Edge], set[str]]:
        """Draw the edges from a node up to a depth, some of them leading back, and the nodes at exactly that depth."""
        edges, seen, layer = list[Edge](), {root}, [root]
        for _ in range(depth):
            following = [_draw_name(rng) for _ in range(rng.randint(1, self.max_nodes))]
            for node in following:
                edges.append((rng.choice(layer), node))
            edges.append((rng.choice(layer), rng.choice(sorted(seen))))
            for node in layer:  # Every node above the last layer begins an edge, so `pieces` adds no other.
                if all(start != node for start, _ in edges):
                    edges.append((node, rng.choice(following)))
            seen |= {*following}
            layer = following
        return list(dict.fromkeys(edges)), set(layer)

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return the F1 score of the last line with an answer, or of the line that the prompt begins."""
        return graphwalks_score(text if self.is_free else _ANSWER + text.split("\n")[0], prompt.required)


def graphwalks_score(text: str, correct: Collection[str]) -> float:
    """Return the F1 score of the list in the last line that contains "Final Answer:".

    As defined in the README of openai/graphwalks since 2026: 0 without a list, 1 if both sets are empty. That README
    scores only the very last line.
    """
    line = next((line for line in reversed(text.split("\n")) if _ANSWER in line), "")
    match = _LIST.search(line)
    if match is None:
        return 0.0
    chosen = {item.strip() for item in match[0].strip("[]").split(",") if item.strip()}
    total = len(chosen) + len(set(correct))
    return 2 * len(chosen & set(correct)) / total if total else 1.0


def _draw_edges(rng: random.Random, targets: list[str]) -> Iterator[Edge]:
    """Yield endless different edges from other nodes, a tenth of them to one of the targets."""
    nodes, known = [_draw_name(rng), _draw_name(rng)], set[Edge]()
    while True:
        nodes.append(_draw_name(rng))
        target = rng.choice(targets) if rng.random() < 0.1 else rng.choice(nodes[:-1])
        for edge in ((nodes[-1], target), (rng.choice(nodes[:-1]), nodes[-1])):
            if edge not in known:
                known.add(edge)
                yield edge


def _draw_name(rng: random.Random) -> str:
    return f"{rng.getrandbits(_NAME_BITS):010x}"


def _format_line(edge: Edge) -> str:
    return f"{edge[0]} -> {edge[1]}\n"
