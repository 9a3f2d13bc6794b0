"""What HTTP/1.1 messages look like: heads, and bodies that are decoded as they come (RFC 9112)."""

from __future__ import annotations

import functools

from yarl import URL


class BadResponse(Exception):
    """What came back is no HTTP/1.1 response that this client understands."""


class Chunks:
    """Decodes a chunked body incrementally; `done` after the last chunk and its trailers."""

    __slots__ = ("done", "_rest")
    waits = True  # its end can be told from a read

    def __init__(self):
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The payload that `data` completes. The network may cut anywhere; a chunk is handed out when it is whole."""
        if not self._rest:
            head = _head_of_whole(len(data))
            if data.startswith(head) and data.endswith(b"\r\n"):
                return data[len(head) : -2]  # the usual read: one whole chunk
        else:
            data, self._rest = self._rest + data, b""
        payload, at, size = [], 0, len(data)
        while at < size:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            length = _chunk_length(data[at:line])
            if length == 0:
                self._end(data, line)
                break
            end = line + 2 + length
            if end + 2 > size:
                break
            if data[end : end + 2] != b"\r\n":
                raise BadResponse("a chunk is longer than it says")
            payload.append(data[line + 2 : end])
            at = end + 2
        if at < size:
            self._rest = data[at:]
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _end(self, data: bytes, line: int) -> None:
        """The last chunk starts at `line`; trailers, if any, end with a blank line."""
        self.done = data.startswith(b"\r\n", line + 2) or data.find(b"\r\n\r\n", line) >= 0


class Counted:
    """A body of known length; None means until the connection closes."""

    __slots__ = ("done", "left")
    waits = False

    def __init__(self, length: int | None):
        self.left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`."""
        if self.left is not None:
            self.left -= len(data)
            self.done = self.left <= 0
        return data


def head_of(method: str, url: URL, headers: dict[str, str], length: int) -> bytes:
    """The head of a request."""
    host = url.raw_authority.rpartition("@")[2]
    lines = [f"{method} {url.raw_path_qs} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_head(head: bytes) -> tuple[int, bytes, dict[str, str]]:
    """(status, version, headers with lower-case names) of a response head; raises BadResponse."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise BadResponse(f"no HTTP/1.1 response: {first[:80]!r}")
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    return int(rest[:3]), version, {name.strip().lower(): value.strip() for name, _, value in pairs}


def body_of(status: int, headers: dict[str, str]) -> Chunks | Counted:
    """What decodes the body after such a head; raises BadResponse."""
    if headers.get("content-encoding", "identity") != "identity":
        raise BadResponse(f"the body is encoded as {headers['content-encoding']}, which was not asked for")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Chunks()
    if status in (204, 304):
        return Counted(0)
    length = headers.get("content-length")
    return Counted(int(length) if length is not None and length.isdigit() else None)


@functools.lru_cache(4096)
def _head_of_whole(size: int) -> bytes:
    """The first line of the chunk that takes `size` bytes with its two line ends; what nothing begins with if none."""
    for digits in range(1, 9):
        line = b"%x\r\n" % max(size - digits - 4, 0)
        if len(line) == digits + 2 and line != b"0\r\n":
            return line
    return b"no chunk"


@functools.lru_cache(4096)
def _chunk_length(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits.isalnum():  # int() would also take a sign or underscores
        raise BadResponse(f"no chunk length: {line[:40]!r}")
    try:
        return int(digits, 16)
    except ValueError:
        raise BadResponse(f"no chunk length: {line[:40]!r}") from None
