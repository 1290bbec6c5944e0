"""Which prompts start alike, and in which order one growing cache serves them all."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Family", "families"]


@dataclass(frozen=True)
class Family:
    """Prompts that follow one path, each up to where it leaves it.

    Attributes:
        path: token ids that the last of them leaves; empty where nothing is shared.
        members: ``(tokens shared with the path, position of the prompt)``, in the order in which they leave it.
    """

    path: tuple[int, ...]
    members: tuple[tuple[int, int], ...]


def families(prompts: Sequence[Sequence[int]], block: int, limit: int) -> list[Family]:
    """Group prompts by common starts.

    Samples of a long-context task share a haystack up to their first needle. So one cache that only grows, forked where
    a prompt leaves the path, saves every prompt its whole start; and since it only grows, it serves windowed layers,
    which cannot be cut back. At each block the path goes where most prompts go.

    Args:
        prompts: token ids.
        block: prompts are compared in blocks of so many tokens, and leave the path at a multiple of it. With the
            prefill's chunk as block, a prompt goes through the model in the same chunks as it would alone.
        limit: longest path.

    Returns:
        Families that together hold each prompt once. The last token of a prompt is never on the path: somebody has to
        read it, to say what follows.
    """
    result: list[Family] = []
    left = list(range(len(prompts)))
    while left:
        path, shared = _path(prompts, left, block, limit)
        if not path:
            return [*result, Family((), tuple((0, position) for position in left))]
        # sorted() is stable: those that leave together keep their order.
        members = sorted(((length, position) for position, length in shared.items()), key=lambda member: member[0])
        result.append(Family(path, tuple(members)))
        left = [position for position in left if position not in shared]
    return result


def _path(
    prompts: Sequence[Sequence[int]], candidates: list[int], block: int, limit: int
) -> tuple[tuple[int, ...], dict[int, int]]:
    """The path that most candidates follow, and how far each of its followers does."""
    path: tuple[int, ...] = ()
    shared: dict[int, int] = {}
    following = candidates
    while len(path) + block <= limit:
        ways: dict[tuple[int, ...], list[int]] = defaultdict(list)
        end = len(path) + block
        for position in following:
            if len(prompts[position]) > end:
                ways[tuple(prompts[position][len(path) : end])].append(position)
        way, following = max(ways.items(), key=lambda item: len(item[1]), default=((), []))
        if len(following) < 2:
            break
        path += way
        shared |= dict.fromkeys(following, end)
    return path, shared
