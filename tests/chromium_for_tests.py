"""A headless Chromium for tests, driven through its DevTools protocol: no other package is needed."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_S, ANSWER_S = 60, 60


def executable():
    """Chromium's path, or None: KVLAB_CHROMIUM, else the usual names."""
    wanted = os.environ.get("KVLAB_CHROMIUM")
    return wanted if wanted else next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Use as a context manager; `call` speaks to the page, `events` is what it told."""

    def __init__(self, folder: Path):
        self.folder, self.events, self._loop, self._id = folder, [], asyncio.new_event_loop(), 0

    def __enter__(self):
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [executable(), *QUIET, *root, f"--user-data-dir={self.folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._loop.run_until_complete(self._connect())
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._session.close())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._loop.close()

    async def _connect(self):
        port_file, until = self.folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"{executable()} did not open its DevTools port.")
            await asyncio.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            targets = await answer.json()
        page = next(target for target in targets if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **params):
        """The result of one command; RuntimeError with what the browser says where it fails."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), ANSWER_S))

    async def _call(self, method, params):
        self._id += 1
        await self._socket.send_json({"id": self._id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def run(self, script: str):
        """The value of a script in the page (promises are awaited)."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"].get("description", str(told)))
        return told["result"].get("value")

    def open(self, url: str) -> list[dict]:
        """Opens a page, waits until it and its pictures are loaded, and returns everything it told meanwhile."""
        self.events.clear()
        if error := self.call("Page.navigate", url=url).get("errorText"):
            raise RuntimeError(f"{url}: {error}")
        ready = "document.readyState === 'complete'"
        self.run(f"new Promise(done => {ready} ? done(1) : addEventListener('load', () => done(1)))")
        self.run("Promise.all([...document.images].map(image => image.decode().catch(() => 0))).then(() => 1)")
        return list(self.events)

    def errors(self) -> list[str]:
        """Console errors, exceptions and failed loads since the page was opened."""
        found = []
        for event in self.events:
            name, told = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"].get("text")))
            elif name == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(told["entry"]["text"])
            elif name == "Runtime.consoleAPICalled" and told["type"] == "error":
                found.append(str(told["args"]))
            elif name == "Network.loadingFailed":
                found.append(told["errorText"])
        return found

    def requested(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
