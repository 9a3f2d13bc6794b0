"""The KV blocks and their free queue, as vLLM's block pool keeps them. Pure bookkeeping: no memory behind it.

A free block keeps its content until it is taken. Taken is the head of the queue; full (hashed) blocks come back at the
tail, others at the head, so that the blocks freed longest ago are lost first, and of one request its last blocks first.
Source: free_blocks() and get_new_blocks() of vLLM's V1 block pool.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`blocks` usable blocks. `free` is the queue of the free ones, the next one to be taken first."""

    def __init__(self, blocks: int, caching: bool):
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.caching = caching
        self.block_of: dict[tuple[int, int], int] = {}
        self.content: dict[int, tuple[int, int]] = {}

    def take(self) -> int:
        """A free block, whose old content is forgotten."""
        block, _ = self.free.popitem(last=False)
        content = self.content.pop(block, None)
        if content is not None and self.block_of.get(content) == block:
            del self.block_of[content]
        return block

    def keep(self, request: int, index: int, block: int) -> None:
        """Block `index` of the request is full: it can be found again."""
        if self.caching:
            self.block_of[request, index] = block
            self.content[block] = (request, index)

    def release(self, blocks: list[int]) -> None:
        """Frees the blocks of a request, its last one first."""
        hashed = [block for block in reversed(blocks) if block in self.content]
        plain = [block for block in reversed(blocks) if block not in self.content]
        self.free.update(OrderedDict.fromkeys(hashed))
        for block in reversed(plain):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def found(self, request: int, at_most: int) -> list[int]:
        """The free blocks that still hold the beginning of the request."""
        blocks = []
        for index in range(at_most):
            block = self.block_of.get((request, index))
            if block is None or block not in self.free:
                break
            blocks.append(block)
        return blocks

    def adopt(self, blocks: list[int]) -> None:
        """Takes blocks that were found, with their content."""
        for block in blocks:
            del self.free[block]
