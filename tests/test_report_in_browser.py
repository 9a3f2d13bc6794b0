"""The reports of all machines and the site in a real browser: one build and one start of Chromium for all of it."""

import base64
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from chromium_for_tests import Browser, executable

from kvlab import facts, report, site, store

ROOT = Path(__file__).parent.parent
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

RUNS = re.compile(r"\d+ of \S+ \(data/|No run of|lies in data/")

LINKS = "[...document.querySelectorAll('a[href], link[href]')].map(a => a.getAttribute('href'))"
IDS = "[...document.querySelectorAll('[id]')].map(e => e.id)"
BLIND = "[...document.images].filter(i => !i.naturalWidth || !i.alt.trim()).map(i => i.outerHTML.slice(0, 80))"
WIDE = """(() => {
  const page = document.documentElement, inside = e => e.closest('.scroll, pre');
  const right = e => e.getBoundingClientRect().right;
  const wide = [...document.body.querySelectorAll('*')].filter(e => right(e) > 361 && !inside(e));
  if (page.scrollWidth <= page.clientWidth) return [];
  return wide.slice(0, 3).map(e => e.outerHTML.slice(0, 90)).concat(page.scrollWidth);
})()"""
PALE = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const part = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = parse(c).map(part);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                        if (parse(c)[3] !== 0) return c; } return 'rgb(255, 255, 255)'; };
  const pale = new Set();
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) pale.add(e.tagName + '.' + e.className);
  }
  return [...pale];
})()"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The report of each machine and the site of one, which shares with the report what was read and drawn for it."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_DATA", str(ROOT / "data"))
        measured = [name for name in store.machines() if name != "article"]
        patch.setattr(report, "content", once(report.content))
        patch.setattr(report, "small_pictures", once(report.small_pictures))
        for machine in measured or ["mine"]:
            report.build_all(machine, folder / machine / "report.html", timings={}, failures={})
        site.build(main_machine(), folder / "site")
    return folder


def once(function):
    """The function, whose results are kept by its positional arguments."""
    kept = {}
    return lambda *args, **more: kept[args] if args in kept else kept.setdefault(args, function(*args, **more))


def main_machine():
    return next((name for name in facts.COMMITTED[1:] if (store.machine_dir(name) / "claims.csv").is_file()), "mine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def report_of(folder, name):
    return next(folder / machine / name for machine in (*facts.COMMITTED[1:], "mine") if (folder / machine).is_dir())


def pages_of(folder):
    return sorted(folder.rglob("*.html"))


def test_every_page_opens_whole_and_asks_nobody(built, browser):
    """No console error, no request that leaves the machine, no dead link, no blind picture, no pale text.

    Nor does a page scroll sideways on a phone.
    """
    pages = pages_of(built)
    reports = [page for page in pages if page.name.startswith("report")]
    assert len(pages) > 40 and len(reports) == 2 * len([p for p in built.iterdir() if p.is_dir() and p.name != "site"])
    links, ids = {}, {}
    for page in pages:
        browser.open(page.as_uri())
        assert browser.errors() == [], page.name
        assert all(url.startswith(("file:", "data:")) for url in browser.requested()), page.name
        links[page], found = browser.run(LINKS), browser.run(IDS)
        ids[page] = set(found)
        assert len(ids[page]) == len(found), f"{page.name}: an id stands twice"
        assert browser.run("document.documentElement.lang") in ("en", "zh-Hans")
        assert browser.run(BLIND) == [], page.name
        assert browser.run(PALE) == [], page.name
        assert on_a_phone(browser, WIDE) == [], page.name
    dead = [f"{page.name}: {link}" for page in pages for link in links[page] if not leads_somewhere(page, link, ids)]
    assert not dead


@pytest.mark.parametrize("name", ["report.html", "report.zh.html"])
def test_numbers_from_a_thousand_on_are_separated(name, built):
    """In prose, captions and tables; conditions as in claims, code, years and names are what they are."""
    for page in built.glob(f"*/{name}"):
        text = re.sub(r"<(style|code|pre)\b.*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.S)
        found = re.findall(r".{0,30}(?<![\w.,=\-/:#])\d{4,}(?![\w-]|\.\d|\)).{0,20}", text)
        assert not found, page


def on_a_phone(browser, script):
    browser.call("Emulation.setDeviceMetricsOverride", **PHONE)
    try:
        return browser.run(script)
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def leads_somewhere(page: Path, link: str, ids: dict[Path, set[str]]) -> bool:
    if link.startswith(("https://", "data:")):
        return True
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file():
        return False
    return not parts.fragment or target.suffix != ".html" or unquote(parts.fragment) in ids[target]


@pytest.mark.parametrize("name", ["report.html", "report.zh.html"])
def test_a_large_screen_shows_all_eight_findings_at_once(name, built, browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=1600, height=1000, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(report_of(built, name).as_uri())
        ends = browser.run("[...document.querySelectorAll('.tile')].map(e => e.getBoundingClientRect().bottom)")
        assert len(ends) == 8 and max(ends) <= 1000
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_it_can_be_read_without_a_mouse(built, browser):
    browser.open(report_of(built, "report.html").as_uri())
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.run("document.activeElement.className") == "skip"
    assert browser.run("document.activeElement.getBoundingClientRect().left") >= 0  # it shows itself when reached
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1


def test_on_paper_each_figure_still_names_its_runs_and_nothing_is_cut(built, browser):
    browser.open(report_of(built, "report.html").as_uri())
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", width=680, height=960, deviceScaleFactor=1, mobile=False)
    try:
        told = browser.run("[...document.querySelectorAll('figcaption, .sources')].map(e => e.innerText)")
        assert len(told) > 20 and all(".ipynb" in text and RUNS.search(text) for text in told)
        folded = "[...document.querySelectorAll('details:not(.names) > summary')].map(e => e.offsetHeight)"
        assert all(height > 0 for height in browser.run(folded))
        cut = "[...document.querySelectorAll('pre, .scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        assert browser.run(f"{cut}.map(e => e.innerText.slice(0, 60))") == []
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
        browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("name", ["report.html", "report.zh.html"])
def test_it_prints_to_a_pdf(name, built, browser):
    browser.open(report_of(built, name).as_uri())
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=False)["data"])
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert pdf.startswith(b"%PDF-") and 8 < pages < 80
