"""Server-sent events, split incrementally: bytes as the network cuts them in, whole events out."""

from __future__ import annotations


class EventSplitter:
    """Cuts a byte stream into events (WHATWG HTML, section 9.2: a blank line ends an event).

    The network may cut anywhere: inside a UTF-8 character, inside `data:`, between CR and LF.
    """

    def __init__(self):
        self._rest = bytearray()  # the beginning of an event that has not ended yet
        self._searched = 0  # bytes of it known to hold no blank line, so that a 1 MB event is searched once
        self._held_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, in order: raw lines, LF endings, without the blank line."""
        if self._held_cr or b"\r" in data:
            data = self._plain_newlines(data)
        if not self._rest and data.endswith(b"\n\n"):
            if data.find(b"\n\n") == len(data) - 2:
                return [data[:-2]]  # the usual read: one whole event
            return _split(data)
        self._rest += data
        end = self._rest.rfind(b"\n\n", max(0, self._searched - 1))
        if end < 0:
            self._searched = len(self._rest)
            return []
        whole = bytes(self._rest[:end])
        del self._rest[: end + 2]
        self._searched = 0
        return _split(whole)

    @property
    def holds(self) -> bool:
        """Whether something is held back that the next read belongs to."""
        return bool(self._rest) or self._held_cr

    def flush(self) -> list[bytes]:
        """What is left when the stream ends without a blank line: at most one event."""
        rest = bytes(self._rest).strip(b"\n")
        self._rest.clear()
        self._searched, self._held_cr = 0, False
        return [rest] if rest else []

    def _plain_newlines(self, data: bytes) -> bytes:
        """CRLF and CR become LF. A CR at the end counts at once; an LF that follows it in the next read is dropped."""
        if self._held_cr and data.startswith(b"\n"):
            data = data[1:]
        self._held_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _split(data: bytes) -> list[bytes]:
    return [event for part in data.split(b"\n\n") if (event := part.strip(b"\n"))]


def data_of(event: bytes) -> bytes | None:
    """The payload of an event: its `data` lines joined; None for comments and events without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def is_error(event: bytes) -> bool:
    """True for an event that is named `error`, whatever its payload."""
    return any(line.startswith(b"event:") and line[6:].strip() == b"error" for line in event.split(b"\n"))
