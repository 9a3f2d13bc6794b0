"""A headless Chromium, driven over its DevTools protocol, and a JupyterLab for it to open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
TOKEN = "workshop"
# Lab loads in seconds; a machine that is busy with other tests takes minutes.
PATIENCE_S = 150


def chromium() -> str | None:
    """The browser's program, where one is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@contextlib.contextmanager
def running(command, **options):
    """A process that ends with the block, and everything that it started."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def jupyterlab(folder: Path, environment: dict[str, str], state: Path):
    """The address of a JupyterLab on the notebooks of `folder`; its own files lie in `state`."""
    from kvlab.ports import free_port

    port = free_port()
    options = [
        *("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
        *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"),
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.news_url=None",
    ]
    homes = {name: str(state / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR")}
    homes |= {"JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"), "JUPYTER_RUNTIME_DIR": str(state / "runtime")}
    base = f"http://127.0.0.1:{port}"
    log = (state / "lab.log").open("w")
    command = [sys.executable, "-m", "jupyterlab", *options]
    with log, running(command, env=environment | homes, stdout=log, stderr=subprocess.STDOUT) as process:
        _until_answers(f"{base}/api/status?token={TOKEN}", process)
        yield base


def _until_answers(url: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, "the program has ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            response.read()
            return
        assert time.monotonic() < end, f"{url} does not answer"
        time.sleep(0.2)


@contextlib.contextmanager
def browser(state: Path):
    """The DevTools address of a headless browser with an empty profile."""
    profile = state / "profile"
    command = [chromium(), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1600,1400"]
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        written, end = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not written.is_file() or len(written.read_text().split()) < 2:
            assert process.poll() is None and time.monotonic() < end, "the browser does not start"
            time.sleep(0.1)
        port, path = written.read_text().split()
        yield f"ws://127.0.0.1:{port}{path}"


class Page:
    """One tab. `failures` are exceptions and errors of its console, `outside` requests that left this computer."""

    def __init__(self, socket, session: str):
        self._socket, self._session, self._next = socket, session, 0
        self._answers: dict[int, asyncio.Future] = {}
        self.failures: list[str] = []
        self.outside: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            waiting = self._answers.pop(data.get("id"), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(data)
            self._note(data.get("method"), data.get("params", {}))

    def _note(self, method: str | None, said: dict) -> None:
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.failures.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Network.requestWillBeSent":
            url = said["request"]["url"]
            if url.startswith(("http", "ws")) and not url.partition("://")[2].startswith(("127.0.0.1", "localhost")):
                self.outside.append(url)

    async def call(self, method: str, **params):
        """One command of the protocol; AssertionError where it fails."""
        self._next += 1
        self._answers[self._next] = asyncio.get_running_loop().create_future()
        answer = self._answers[self._next]
        await self._socket.send_json({"id": self._next, "method": method, "params": params, "sessionId": self._session})
        data = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in data, f"{method}: {data.get('error')}"
        return data["result"]

    async def js(self, expression: str):
        """The value of an expression in the page (a promise is awaited)."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, what: str, seconds: float = PATIENCE_S):
        """Waits until the expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page may just be loading
                if value := await self.js(expression):
                    return value
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s; {self.failures[:3]}"
            await asyncio.sleep(0.2)

    async def key(self, name: str, code: int) -> None:
        """A key, pressed and released where the focus is."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    async def screenshot(self, path: Path) -> None:
        """The visible part of the page as a PNG."""
        import base64

        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def page(devtools: str, url: str):
    """A tab that shows `url`; closed at the end."""
    async with aiohttp.ClientSession() as session, session.ws_connect(devtools, max_msg_size=0) as socket:
        await socket.send_json({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
        target = (await _answer(socket, 1))["targetId"]
        attach = {"targetId": target, "flatten": True}
        await socket.send_json({"id": 2, "method": "Target.attachToTarget", "params": attach})
        tab = Page(socket, (await _answer(socket, 2))["sessionId"])
        for domain in ("Runtime", "Page", "Network"):
            await tab.call(f"{domain}.enable")
        await tab.call("Page.navigate", url=url)
        try:
            yield tab
        finally:
            tab._reader.cancel()
            await socket.send_json({"id": 10**6, "method": "Target.closeTarget", "params": {"targetId": target}})


async def _answer(socket, number: int) -> dict:
    async for message in socket:
        data = json.loads(message.data)
        if data.get("id") == number:
            return data["result"]
    raise AssertionError("the browser has gone")


# -- notebooks ----------------------------------------------------------------------------------------------------

CURRENT = "jupyterapp.shell.currentWidget"
CELLS = f"[...{CURRENT}.content.model.cells].filter(c => c.type === 'code').map(c => c.sharedModel.toJSON())"


@contextlib.asynccontextmanager
async def notebook(devtools: str, lab: str, name: str, *, kernel: bool = True):
    """A tab with a notebook, its kernel ready or, where nothing is to be run, not waited for; it ends with the tab."""
    async with page(devtools, f"{lab}/lab/tree/{name}?token={TOKEN}&reset") as tab:
        ready = f"{CURRENT}?.context?.isReady && {CURRENT}.context.path.endsWith({Path(name).name!r})"
        await tab.until(f"!!({ready})", f"{name} opens")
        if kernel:
            await tab.until(
                f"{CURRENT}.sessionContext.session?.kernel?.status === 'idle'", f"the kernel of {name} starts"
            )
        yield tab
        await tab.js(f"{CURRENT}.sessionContext.shutdown()")


@contextlib.asynccontextmanager
async def empty_lab(devtools: str, lab: str):
    """A tab with JupyterLab and no notebook: one after the other may be opened in it."""
    async with page(devtools, f"{lab}/lab?token={TOKEN}&reset") as tab:
        await tab.until("!!jupyterapp?.restored && jupyterapp.restored.then(() => true)", "JupyterLab opens")
        yield tab


async def open_in(tab: Page, name: str) -> None:
    """Opens a notebook in the tab's JupyterLab, as a click on its name does, without a kernel."""
    options = {"path": name, "factory": "Notebook", "kernelPreference": {"shouldStart": False, "canStart": False}}
    await tab.js(f"jupyterapp.commands.execute('docmanager:open', {json.dumps(options)}).then(() => true)")
    ready = f"{CURRENT}?.context?.isReady && {CURRENT}.context.path === {name!r}"
    await tab.until(f"!!({ready})", f"{name} opens")


async def run_all(tab: Page, name: str, seconds: float = 300) -> list[dict]:
    """Runs all cells; the code cells once the last one is done. AssertionError with the message of one that fails."""
    await tab.js("void jupyterapp.commands.execute('notebook:run-all-cells')")
    done = f"(() => {{ const all = {CELLS}; return all.some(failed) || all.every(c => c.execution_count) }})()"
    failed = "const failed = c => (c.outputs || []).some(o => o.output_type === 'error');"
    await tab.until(done.replace("(() => {", f"(() => {{ {failed}", 1), f"all cells of {name} run", seconds)
    await tab.until(f"{CURRENT}.sessionContext.session.kernel.status === 'idle'", "the kernel comes to rest")
    cells = json.loads(await tab.js(f"JSON.stringify({CELLS})"))
    errors = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert not errors, f"{name}: {errors[0]['ename']}: {errors[0]['evalue']}"
    return cells
