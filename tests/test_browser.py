"""JupyterLab in a real browser: notebooks open, "Run all" works, a slider moves its picture.

All boards at once take longer than the rest together: they run with `make test-browser` (KVLAB_BROWSER=1).
"""

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

import browser_for_tests as web
import nbformat
import pytest
from browser_for_tests import CURRENT

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(str(path.relative_to(ROOT / "notebooks")) for path in (ROOT / "notebooks").rglob("*.ipynb"))
ALL = os.environ.get("KVLAB_BROWSER") == "1"
NO_KERNEL = "null (reading 'kernel')"  # what ipywidgets says of a notebook that is opened and not run
IMAGE = ".jp-OutputArea .widget-image, .jp-OutputArea img.jupyter-widgets"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(web.chromium() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed"),
]
thorough = pytest.mark.skipif(not ALL, reason="takes minutes; run with `make test-browser`")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of notebooks and data, so that nothing is written into the project; JupyterLab and the browser on it."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns(".lock"))
    state = tmp_path_factory.mktemp("state")
    environment = os.environ | {"KVLAB_DATA": str(folder / "data"), "KVLAB_CACHE": str(state / "cache")}
    with web.jupyterlab(folder / "notebooks", environment, state) as lab, web.browser(state) as devtools:
        yield devtools, lab, folder


def set_parameter(folder, name, old, new):
    """Edits the copy as a reader would."""
    path = folder / "notebooks" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_exercise_runs_and_a_slider_moves_its_picture(place):
    devtools, lab, folder = place
    asyncio.run(_exercise(devtools, lab))
    asyncio.run(_slider(devtools, lab, folder))


async def _exercise(devtools, lab):
    async with web.notebook(devtools, lab, "workshop/01_bytes_per_token.ipynb") as tab:
        cells = await web.run_all(tab, "the exercise")
        assert sum("write your answer" in str(cell["outputs"]) for cell in cells) == 4
        assert not tab.failures and not tab.outside


async def _slider(devtools, lab, folder):
    """One board is enough here: the cells of the others are left out of the copy."""
    path = folder / "notebooks" / "play" / "one.ipynb"
    made = nbformat.read(folder / "notebooks" / "play" / "formulas.ipynb", as_version=4)
    kept = ("parameters", "import play_values", '"stall"')
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    made.cells = [c for c in code if "parameters" in c.metadata.get("tags", []) or any(k in c.source for k in kept)]
    nbformat.write(made, path)
    async with web.notebook(devtools, lab, "play/one.ipynb") as tab:
        cells = await web.run_all(tab, "the board")
        static, board = cells[-2], cells[-1]
        assert any("image/png" in output.get("data", {}) for output in static["outputs"])  # without widgets
        assert "application/vnd.jupyter.widget-view+json" in str(board["outputs"])
        source = f"document.querySelector('{IMAGE}')?.src"
        before = await tab.until(source, "the board's picture shows")
        label = (
            "[...document.querySelectorAll('.widget-inline-hbox')].find(w => w.textContent.includes('chunk, tokens'))"
        )
        await tab.js(f"{label}.querySelector('.noUi-handle').focus()")
        for _ in range(3):
            await tab.key("ArrowRight", 39)
        await tab.until(f"{source} !== {before!r}", "the picture follows the slider")
        assert not tab.failures and not tab.outside


def test_every_notebook_opens(place):
    devtools, lab, _ = place

    async def opens():
        async with web.empty_lab(devtools, lab) as tab:
            for name in NOTEBOOKS:
                await web.open_in(tab, name)
                cells = nbformat.read(ROOT / "notebooks" / name, as_version=4).cells
                assert await tab.js(f"{CURRENT}.content.model.cells.length") == len(cells)
                title = cells[0].source.splitlines()[0].lstrip("# ")
                headings = f"[...{CURRENT}.node.querySelectorAll('.jp-RenderedMarkdown h1')]"
                shown = f"{headings}.some(h => h.textContent.includes({title!r}))"
                await tab.until(shown, f"the title of {name} shows")
                await tab.js(f"{CURRENT}.dispose()")  # many open ones slow the next one down
            assert not [said for said in tab.failures if NO_KERNEL not in said] and not tab.outside

    asyncio.run(opens())


@pytest.mark.parametrize("name", ["01_kv_capacity.ipynb", "06_prefix_cache.ipynb"])
def test_run_all_works_for_a_section_in_replay(place, name):
    """No cell ends in an error, each figure that the notebook saves shows, and so do its claims with their numbers."""
    devtools, lab, folder = place
    set_parameter(folder, name, 'MACHINE: str = \\"\\"', 'MACHINE: str = \\"cpu-tiny\\"')
    set_parameter(folder, name, 'MODE: str = \\"auto\\"', 'MODE: str = \\"replay\\"')

    async def runs():
        async with web.notebook(devtools, lab, name) as tab:
            cells = await web.run_all(tab, name)
            figures = [cell["source"].count("plot.save(") for cell in cells]
            assert sum(figures) >= 1 and figures == [pictures(cell) for cell in cells]
            tables = [str(output.get("data", {}).get("text/html", "")) for c in cells for output in c["outputs"]]
            assert any("capacity_tokens" in table or "ttft_hit_s" in table for table in tables)
            assert not tab.failures

    asyncio.run(runs())


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


@thorough
def test_run_all_works_for_every_board(place):
    devtools, lab, _ = place

    async def runs():
        async with web.notebook(devtools, lab, "play/formulas.ipynb") as tab:
            await web.run_all(tab, "the boards")
            await tab.until(f"document.querySelectorAll('{IMAGE}').length >= 1", "a board shows")
            assert not tab.failures and not tab.outside

    asyncio.run(runs())
