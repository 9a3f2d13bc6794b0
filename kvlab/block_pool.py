"""The free queue of the KV blocks, as vLLM's block pool keeps it. Pure bookkeeping: no memory behind it.

A free block keeps its content until it is taken. Taken is the head of the queue; full (hashed) blocks come back at the
tail, others at the head, so that the blocks freed longest ago are lost first, and of one request its last blocks first.
So a request's full blocks lie together, last one first, and what is left of them is the beginning of the request: a
number says it all, and no block needs a name. Source: free_blocks() and get_new_blocks() of vLLM's V1 block pool.
"""

from __future__ import annotations

from collections import deque


class Stretch:
    """Neighbours in the free queue: `blocks` of them are still there, the first blocks of their request."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: int = 0):
        self.blocks = blocks


class BlockPool:
    """`blocks` usable blocks, of which `free` are in the queue."""

    def __init__(self, blocks: int, caching: bool):
        self.free = blocks
        self.caching = caching
        self._queue = deque([Stretch(blocks)])

    def take(self, blocks: int) -> None:
        """Takes that many free blocks, whose old content is forgotten."""
        self.free -= blocks
        while blocks:
            head = self._queue[0]
            if head.blocks > blocks:
                head.blocks -= blocks
                return
            blocks -= head.blocks
            head.blocks = 0
            self._queue.popleft()

    def release(self, full: int, others: int) -> Stretch:
        """Frees the blocks of a request; returns what can be found again of it."""
        self.free += full + others
        found = Stretch()
        if self.caching and full:
            found.blocks = full
            self._queue.append(found)
        else:
            others += full
        if others:
            self._queue.appendleft(Stretch(others))
        return found

    def adopt(self, found: Stretch) -> None:
        """Takes blocks that were found, with their content."""
        self.free -= found.blocks
        found.blocks = 0
