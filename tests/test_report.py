import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables_for_tests import request, requests, samples

from kvlab import claims, plot, plot_small, report, run, store
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import StoreError
from kvlab.measure import EXISTING, Lab

EVIL = "<script>alert('x')</script> & more"


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(plot_small, "draw", lambda *_: "")  # drawn for real in test_plot_small.py


def save_run(machine, name="c1", *, model="geometry:Qwen3-1.7B", fake=False, valid=True, day="2026-01-02"):
    cell = Cell(
        name=name, server=ServerConfig(model=model), load=LoadConfig(requests=1, input_tokens=9, output_tokens=3)
    )
    manifest = {
        "key": f"{hash(name) & 0xFFFFFFFF:012x}",
        "cell": cell.model_dump(mode="json"),
        "profile": "h200",
        "created_utc": f"{day}T10:00:00.000+00:00",
        "duration_s": 1.0,
        "server": {"version": "0.31.0"},
        "provenance": {"cpu": "A Processor", "cores": {"usable": 4}, "memory_bytes": 2**34, "gpus": []},
        "summary": {"n": 1},
        "certificate": {},
        "fake": fake,
        "valid": valid,
    }
    return store.save_run(machine, "load", manifest, requests(request()), samples({"t_s": 0.0}))


def small_machine(name="mine"):
    """Two runs, four claims, a figure."""
    first, _ = save_run(name), save_run(name, "c2", day="2026-01-05")
    stated = [
        claims.claim(
            "load", "ttft_p50_s", {"c": 1, "in": 512}, computed=0.5, measured=0.6681, ci=(0.61, 0.7), unit="s"
        ),
        claims.claim("load", "kv_bytes", {"c": 1}, computed=2**30, unit="bytes"),
        claims.claim("load", "itl_p99_s", {"c": 1}, unit="s", reason=f"n too small {EVIL}"),
        claims.claim("load", "throughput_tok_s", {"c": 8}, unit="tok/s", reason="it died", failed=True),
    ]
    claims.write_section(store.machine_dir(name), "load", stated)
    lab = Lab("load", None, name, "replay")
    figure, axes = plot.panels(1, titles=["A figure"])
    plot.measured_points(axes[0], [1, 2], [3, 4])
    plot.save(figure, lab, "load", [], alt=f"A curve. {EVIL}")
    return first


class Page(HTMLParser):
    """The rows of every table as texts, everything that would be fetched, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.fetched, self.tags, self._cell = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "srcset", "poster", "data", "action")]
        self.fetched += [value for name, value in attrs if name == "href" and tag != "a"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = ""

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self._cell)
            self._cell = None


def built(tmp_path, machine="mine", **more):
    path = report.build(machine, tmp_path / "build" / "report.html", **({"timings": {}, "failures": {}} | more))
    return path.read_text()


def row(page, quantity):
    return next(cells for cells in page.rows if cells and cells[0] == quantity)


def of_machine(page, name):
    """The machine's row in the table of where the numbers come from."""
    return next(cells for cells in page.rows if cells and cells[0] == name and len(cells) == 8)


def test_claims_stand_in_the_page_as_they_stand_in_the_file(tmp_path):
    small_machine()
    page = Page(built(tmp_path))
    interval = "610 ms … 700 ms"
    assert row(page, "ttft_p50_s") == ["ttft_p50_s", "c=1, in=512", "500 ms", "668.1 ms", interval, "+33.6%"]
    assert row(page, "kv_bytes")[2:5] == ["1 GiB", "", ""]
    assert (
        len(
            [
                cells
                for cells in page.rows
                if cells and cells[0] in set(claims.read(store.machine_dir("mine"))["quantity"])
            ]
        )
        == 4
    )


def test_what_is_missing_is_said_with_its_reason(tmp_path):  # pitfall 5, pitfall 6
    small_machine()
    page = Page(built(tmp_path))
    assert row(page, "itl_p99_s")[3] == f"not measured: n too small {EVIL}"
    assert row(page, "throughput_tok_s")[3] == "failed: it died"
    assert all(f"1 {state}" in built(tmp_path) for state in claims.STATES)


def test_the_figure_is_in_the_page_with_its_words(tmp_path):
    small_machine()
    text = built(tmp_path)
    assert '<figure id="figure-load">' in text and text.count("<figure ") == 1
    assert 'alt="A curve. &lt;script&gt;' in text and "02_load.ipynb" in text


def test_nothing_is_fetched_and_nothing_runs(tmp_path):
    small_machine()
    text = built(tmp_path)
    page = Page(text)
    assert page.fetched and all(value.startswith("data:") for value in page.fetched)
    assert not re.search(r"url\(|@import", text)
    assert not {"script", "iframe", "object", "embed"} & set(page.tags)  # texts of claims and figures are escaped


def test_runs_of_the_fake_server_are_refused(tmp_path):
    small_machine()
    save_run("fake", fake=True)
    with pytest.raises(StoreError, match="fake server") as caught:
        built(tmp_path)
    assert "data/fake/load" in str(caught.value) and not (tmp_path / "build").exists()


def test_other_machines_stand_beside_where_they_have_the_same_claim(tmp_path):
    small_machine()
    other = claims.claim("load", "ttft_p50_s", {"c": 1, "in": 512}, measured=0.02, unit="s")
    alone = claims.claim("load", "ttft_p50_s", {"c": 77}, measured=0.03, unit="s")
    claims.write_section(store.machine_dir("h200"), "load", [other, alone])
    claims.write_section(
        store.machine_dir("article"), "kv_capacity", [claims.claim("kv_capacity", "x", "", measured=1, unit="s")]
    )
    page = Page(built(tmp_path))
    heads = [cells for cells in page.rows if cells[:2] == ["quantity", "conditions"]]
    assert heads[0][-1] == "h200" and row(page, "ttft_p50_s")[-1] == "20 ms"
    assert row(page, "kv_bytes")[-1] == ""
    assert not any("30 ms" in cell for cells in page.rows for cell in cells)
    assert any(cells[0] == "article" and "published in the article" in cells[1] for cells in page.rows if cells)


def test_the_origin_of_the_numbers_is_told(tmp_path):
    small_machine()
    save_run("mine", "c3", valid=False, day="2026-02-01")
    page = Page(built(tmp_path))
    told = of_machine(page, "mine")
    assert told[1:4] == ["A Processor, 4 cores, 16 GiB memory", "vLLM 0.31.0 (cuda)", "geometry:Qwen3-1.7B"]
    assert told[4].startswith("dummy") and told[5:7] == ["2026-01-02 to 2026-01-05", "2"]


def test_the_readers_own_machine_is_marked_in_every_table_of_machines(tmp_path):
    small_machine()
    text = built(tmp_path)
    assert text.count('<tr class="own"><td class="t">mine</td>') == 2  # hardware and engine; versions
    assert text.count('<tr class="own"><th class="t" scope="row">mine</th>') == 8  # the findings
    assert "tr.own > *" in text


def test_of_an_existing_server_only_what_is_known_is_told(tmp_path):
    save_run("server-1234", model=f"{EXISTING} server-1234")
    page = Page(built(tmp_path, "server-1234"))
    told = of_machine(page, "server-1234")
    assert told[1:5] == ["unknown", "vLLM 0.31.0", f"{EXISTING} server-1234", "unknown"]


def test_a_machine_without_anything_still_has_a_page(tmp_path):
    page = Page(text := built(tmp_path, "new-machine", failures={"load": f"It died.\nLikely cause: {EVIL}"}))
    assert "none yet" in text and 'did not finish: <span lang="en">It died.' in text
    told = of_machine(page, "new-machine")
    assert told[1:7] == ["unknown", "unknown", "unknown", "unknown", "not measured", "0"]
    assert all(f'<section id="{name}">' in text for name in run.notebooks()) and "script" not in page.tags


def test_the_page_is_the_same_for_the_same_data(tmp_path, monkeypatch):
    small_machine()
    made = re.compile(r"Made \d{4}-\d\d-\d\d \d\d:\d\d UTC")
    assert made.sub("", built(tmp_path)) == made.sub("", built(tmp_path))


def test_how_long_a_section_took_is_told(tmp_path):
    small_machine()
    assert "This notebook took 93 s." in built(tmp_path, timings={"load": 92.6})


def test_a_figure_of_another_section_is_not_shown_here(tmp_path):
    small_machine()
    file = store.figures_dir("mine") / "load.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"notebook": "prefix_cache"}))
    text = built(tmp_path)
    assert text.index('<section id="prefix_cache">') < text.index("<figure ")


def test_letters_are_equally_high_in_all_figures(tmp_path):
    small_machine()
    widths = {}
    for name, columns in (("narrow", 1), ("wide", 3)):
        figure, _ = plot.panels(columns, width=4)
        plot.measured_points(figure.axes[0], [1, 2], [3, 4])
        plot.save(figure, Lab("load", None, "mine", "replay"), name, [], alt=name)
        svg = (store.figures_dir("mine") / f"{name}.svg").read_text()
        shown = re.search(rf'<figure id="figure-{name}">.*?width="(\d+)"', built(tmp_path), re.S)
        widths[name] = float(shown[1]) / float(re.search(r'width="([\d.]+)pt"', svg)[1])
    assert widths["narrow"] == pytest.approx(widths["wide"], rel=0.01)


def test_a_section_of_which_nothing_is_known_shows_no_table_of_gaps(tmp_path):
    gaps = [claims.claim("load", f"gap_{i}", unit="s", reason="no GPU") for i in range(9)]
    claims.write_section(store.machine_dir("mine"), "load", gaps)
    text = built(tmp_path)
    section = text[text.index('<section id="load">') :]
    assert section.index("9 more claims") < section.index("gap_0")


def test_each_figure_names_its_runs(tmp_path):
    small_machine()
    file = store.figures_dir("mine") / "load.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"runs": ["c1-r0-abc", "c2-r0-def"]}))
    text = built(tmp_path)
    assert "Runs behind it: 2 of mine" in text and "c1-r0-abc, c2-r0-def" in text
    long = [f"c{n}-r0" for n in range(7)]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"runs": long}))
    text = built(tmp_path)
    assert "7 of mine" in text and re.search(r'<details class="names">.*?c0-r0, c1-r0', text, re.S)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"runs": []}))
    assert "No run of mine is behind it" in built(tmp_path)


def test_where_nothing_was_measured_the_figure_of_a_machine_that_did_is_shown(tmp_path):
    small_machine(), small_machine("h200")
    figure = store.figures_dir("h200") / "load.json"
    figure.write_text(json.dumps(json.loads(figure.read_text()) | {"runs": ["c1-r0-abc"]}))
    text = built(tmp_path)
    assert "Measured on h200; on mine nothing of it was measured." in text and "1 of h200" in text
    assert text.count('id="figure-load"') == 1
    own = store.figures_dir("mine") / "load.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"runs": ["c2-r0-def"]}))
    assert "Measured on h200" not in built(tmp_path)


def test_a_number_of_a_late_client_is_marked_wherever_it_stands(tmp_path, monkeypatch):
    small_machine()
    assert "†" not in built(tmp_path)
    told = {"certificate": {"late": True}}
    late = SimpleNamespace(id="late-run", manifest=told, path=Path("data/mine/load/late-run"))
    monkeypatch.setattr(report.facts, "stored_runs", lambda machine: [late])
    file = store.machine_dir("mine") / claims.FILE
    table = claims.read(store.machine_dir("mine"))
    table.loc[table["measured"].notna(), "runs"] = "early;late-run"
    table.to_csv(file, index=False)
    page = built(tmp_path)
    assert 'href="#method" title="The load generator was over' in page and page.count("668.1 ms<sup>") == 1
    assert "† The load generator was over the limits" in page


def test_a_formula_that_goes_on_beyond_the_screen_shows_it():
    """A phone hides scrollbars: a shadow at the edge (`scroll`) that the text's end covers (`local`)."""
    (rule,) = re.findall(r"^pre \{([^}]*)\}", report.style(), re.M)
    assert rule.count(" local") == 2 == rule.count(" scroll,") and "scrollbar-width" in rule


def test_where_nothing_was_measured_the_figure_of_a_machine_with_the_same_engine_stands_in():
    engines = {"x2": "cuda", "cpu": "cpu", "h200": "cuda", "article": None}
    said = report.likest_first("x2", ["article", "cpu", "h200"], lambda name: {"engine": engines[name]})
    assert said == ["h200", "article", "cpu"]


def test_a_long_name_may_break_behind_its_underscores_and_a_number_nowhere():
    parts = report._template().environment.get_template("report_parts.html")
    said = parts.make_module({"w": {}}).breakable("max_num_seqs=16, in=512 <")
    assert said == "max_<wbr>num_<wbr>seqs=16, in=512 &lt;"
