"""The write-up's texts: complete in both languages, filled from claims alone."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from kvlab import claims, facts, findings, pages, plot_small, prose, report, run, store
from kvlab.prose import Notes, ProseError

ROOT = Path(__file__).parent.parent
EN, ZH = pages.LANGUAGES


def writer_of(language, machine="h200", *further):
    tables = {name: claims.read(store.machine_dir(name)) for name in (machine, *facts.COMMITTED, *further)}
    return prose.Writer(facts.facts(machine, tables), pages.words(language), pages.sources(), report._once(facts.about))


@pytest.fixture
def committed(monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    if not all((ROOT / "data" / name / "claims.csv").is_file() for name in facts.COMMITTED):
        pytest.skip("the committed machines are not here")


@pytest.fixture
def empty(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))


# -- the texts that are shipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_every_number_of_the_texts_comes_from_a_claim(language, committed):
    pages.check_all(writer_of(language), language)


def test_every_claim_that_a_text_names_is_one_that_a_notebook_makes(committed):
    """A slip of the pen would read "not measured" for ever; a claim of a notebook that was not run yet may."""
    known = writer_of(EN).facts.known
    made = {name: path.read_text() for name, path in run.notebooks().items()}
    named = {place for name in pages.names(EN) for place in pages.places(pages.source(name, EN))}
    claims_named = {
        tuple(match) for place in named for match in re.findall(r"(?:[a-z0-9-]+) ([a-z_]+) ([a-z]\w+)", place)
    }
    sides = {(words[1], words[2]) for place in named if (words := place.split())[0] == "side"}
    skipped = {"about", "lit", "cited", "machine", "ref", "side"}
    plain = {(a, b) for a, b in claims_named if a in made and not skipped & {a, b}} | sides
    assert plain and not [(a, b) for a, b in plain if not known(a, b) and b not in made.get(a, "")]


def test_every_claim_that_a_text_names_on_a_committed_machine_is_there(committed):
    """A number measured under new conditions must not turn into "not measured" unnoticed."""
    known = store.machines()
    writer = writer_of(EN, *known)
    lost = []
    for name in pages.names(EN):
        for place in pages.places(pages.source(name, EN)):
            lost += [term for term in named(place) if term.split()[0] in known and lost_in(term, writer)]
    assert not lost


def named(place):
    """The claims that a place names, each with its machine; those of a table only where it names the machine."""
    if place.startswith("side "):
        section, (first, *others) = place.split()[1], place.partition(" ")[2].split(" @")
        quantity = first.split()[1]
        elsewhere = [other.split(" ", 1) for other in others if not other.endswith(" none")]
        placed = [term for _, where in elsewhere if where[0] == "{" for term in named(where[1:-1])]
        return placed + [f"{machine} {section} {quantity} {where}" for machine, where in elsewhere if where[0] != "{"]
    head = re.sub(r"^(say|holds|told) ", "", place.partition("|")[0].strip())
    return re.split(r" [/<>-] ", head)


def lost_in(term, writer):
    return prose.claim_cells(term, writer)[0] is None


@pytest.mark.parametrize("name", pages.names(EN))
def test_both_languages_hold_the_same_claims(name):
    english, chinese = (pages.source(name, language) for language in (EN, ZH))
    assert chinese is not None and Counter(pages.places(english)) == Counter(pages.places(chinese))
    shape = re.compile(r"^(#+ |```|\| |- |\d+\. )", re.M)
    assert Counter(shape.findall(english)) == Counter(shape.findall(chinese))  # headings, tables, lists


def test_both_languages_have_the_same_texts_and_words():
    assert pages.names(EN) == pages.names(ZH)
    english, chinese = pages.words(EN), pages.words(ZH)
    assert english.keys() == chinese.keys() and english["states"].keys() == chinese["states"].keys()
    assert english["read"].keys() == chinese["read"].keys()
    for said, again in ((english, chinese), (english["instrument"], chinese["instrument"])):
        assert said.keys() == again.keys()
        holes = {key: re.findall(r"\{\w+\}", text) for key, text in said.items() if isinstance(text, str)}
        assert all(Counter(re.findall(r"\{\w+\}", again[key])) == Counter(found) for key, found in holes.items())


def test_chinese_is_chinese():
    for name in pages.names(ZH):
        plain = prose.blank(prose.blank(pages.source(name, ZH), prose.PLACE), prose.CODE)
        letters = re.findall(r"[一-鿿]", plain)
        assert len(letters) > len(re.findall(r"[A-Za-z]{3,}", plain)), name
        assert not re.search(r"[一-鿿][,;?!]", plain), name  # Chinese marks between Chinese characters


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_there_is_a_text_for_every_section_and_the_links_lead_to_pages(language):
    order = pages.order(list(run.notebooks()), language)
    assert set(run.notebooks()) <= set(pages.names(language))
    assert set(pages.names(language)) <= {*order, "overview", "findings"}
    for name in pages.names(language):
        assert set(re.findall(r"\]\(#([\w-]+)\)", pages.source(name, language))) <= set(order), name


def test_the_eight_findings_have_words_and_a_picture():
    assert len(findings.listed()) == 8
    assert set(findings.listed()) == set(plot_small.DRAWN) == set(findings.texts(EN)) == set(findings.texts(ZH))


def test_every_source_is_used_and_says_what_was_read_of_it():
    text = "".join(pages.source(name, EN) for name in pages.names(EN))
    cited = {(key, number) for number, key in re.findall(r"\{cited ([^|}]+?) \| ([\w-]+)\}", text)}
    assert cited == {(key, number) for key, source in pages.sources().items() for number in source["numbers"]}
    for language in pages.LANGUAGES:
        assert {source["read"] for source in pages.sources().values()} == set(pages.words(language)["read"])
    assert set(re.findall(r"\{ref ([\w-]+)\}", text)) == set(pages.sources())
    assert all(source["url"].startswith("https://") for source in pages.sources().values())


def test_texts_and_styles_travel_with_a_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kvlab"]
    packed = {path for pattern in patterns for path in (ROOT / "kvlab").glob(pattern)}
    kinds = {".toml", ".md", ".html", ".css", ".txt", ".mplstyle"}
    files = {path for path in (ROOT / "kvlab").rglob("*") if path.suffix in kinds}
    assert files and files <= packed


# -- how texts are filled -------------------------------------------------------------------------------------------


def test_a_page_has_title_lead_body_and_reasons(empty, monkeypatch):
    text = "# A title\n\nThe *lead* {h200 load x}.\n\nBody {h200 load x} and {article load x}.\n"
    monkeypatch.setattr(pages, "source", lambda name, language: text)
    page = pages.page("load", writer_of(EN), EN)
    assert page.title == "A title" and page.lead.startswith("The <em>lead</em> <span")
    assert 'href="#load-why-1"' in page.body and 'href="#load-why-2"' in page.body
    assert page.why == (
        pages.words(EN)["no_claim"].format(machine="h200", section="load"),
        "the article does not state it",
    )


def test_a_text_that_is_not_there_is_no_page(empty):
    assert pages.page("nothing", writer_of(EN), EN) is None
    with pytest.raises(ProseError, match="no language 'fr'"):
        pages.names("fr")


def test_machines_stand_side_by_side_and_the_readers_own_comes_last(empty):
    for machine, value in (("mine", 3), ("h200", 4)):
        row = claims.claim("load", "x", {"c": 8 if machine == "mine" else 64}, computed=2, measured=value, unit="s")
        claims.write_section(store.machine_dir(machine), "load", [row])
    notes = Notes("load")
    html = pages.block("```side load\nfirst <token>: x c=8 @h200 c=64\n```\n", writer_of(EN, "mine"), notes)
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", html)
    assert heads[:5] == ["quantity", "article", "h200", "cpu-tiny", "mine"] and "first &lt;token&gt;" in html
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", html)]
    assert cells[1] == "2,000 ms → 4,000 ms (+100.0%)" and cells[3] == "2,000 ms → 3,000 ms (+50.0%)"
    assert html.count("<div") == html.count("</div>") == 1  # wide tables scroll by themselves
    assert 'data-label="h200"' in html  # what a narrow screen shows in place of columns
    assert cells[0].startswith("not measured") and html.count('class="own"') == 2


def test_a_cell_may_hold_a_place_of_two_claims(empty):
    both = [claims.claim("load", "y", {"graphs": s}, measured=v, unit="s") for s, v in (("on", 3.0), ("off", 2.0))]
    claims.write_section(store.machine_dir("article"), "load", both)
    place = "{article load y graphs=on / article load y graphs=off | percent}"
    line = f"gain: gain c=1 @article {place} @h200 c=2"
    html = pages.block(f"```side load\n{line}\n```\n", writer_of(EN, "mine"), Notes("load"))
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", html)]
    assert cells[0] == "+50%" and all(cell.startswith("not measured") for cell in cells[1:])


def test_each_cell_of_a_written_table_names_its_column(empty):
    html = pages.block("| a | b <c> |\n|---|---|\n| 一 | |\n", writer_of(EN), Notes("x"))
    assert '<td data-label="a">一</td>' in html and html.count("data-label") == 2


def test_a_further_machine_has_a_column_where_it_has_measured_something(empty):
    for machine, values in (("h200-x2", {"measured": 3}), ("later", {"reason": "no GPU yet"})):
        claims.write_section(store.machine_dir(machine), "load", [claims.claim("load", "x", unit="s", **values)])
    tables = {name: claims.read(store.machine_dir(name)) for name in (*facts.COMMITTED, "mine", "h200-x2", "later")}
    writer = prose.Writer(facts.facts("mine", tables), pages.words(EN), {}, report._once(facts.about))
    html = pages.block("```side load\nwords: x\n```\n", writer, Notes("load"))
    heads = re.findall(r'scope="col">([^<]*)</th>', html)
    assert heads == ["quantity", "article", "h200", "cpu-tiny", "h200-x2", "mine"]


@pytest.mark.parametrize(
    "line",
    ["no colon here", "words: ", "words: x c=8 @h200", "words: x c=8 @h200 c=1 more", "words: x @article {a b c"],
)
def test_a_line_of_a_table_that_cannot_be_read_is_told(line, empty):
    with pytest.raises(ProseError, match="is no line of a table"):
        pages.side_rows("load", line, writer_of(EN))


def test_a_number_in_a_text_ends_the_build(empty, monkeypatch, tmp_path):
    known = pages.source
    text = "# Load\n\nIt is 14 times faster.\n"
    monkeypatch.setattr(pages, "source", lambda name, lang: text if name == "load" else known(name, lang))
    with pytest.raises(ProseError, match=r"load.md, line 3: the number 14 comes from no claim"):
        report.build("mine", tmp_path / "report.html", timings={}, failures={})
    assert not (tmp_path / "report.html").exists()
