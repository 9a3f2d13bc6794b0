"""Claims: checked on the way in, null where missing, replaced a section at a time."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest

from kvlab import claims, display, stats, store
from kvlab.claims import claim
from kvlab.errors import StoreError

# -- one claim


def test_id_residual_and_state_follow():
    c = claim("load", "ttft_p50_s", {"c": 32, "in": 512, "out": 128}, unit="s", computed=0.5, measured=0.6)
    assert c.id == "load/ttft_p50_s/c=32;in=512;out=128"
    assert c.conditions == "c=32;in=512;out=128"
    assert c.residual == pytest.approx(0.2)
    assert c.state == "measured"
    assert claim("load", "ttft_p50_s", "c=32;in=512;out=128", unit="s", measured=1.0).id == c.id


def test_fields_are_exactly_those_of_the_file():
    names = "id section quantity conditions computed measured ci_low ci_high unit residual state reason runs"
    assert tuple(names.split()) == claims.COLUMNS


def test_conditions_draw_switches_and_leave_out_none():
    c = claim("a", "q", {"caching": True, "graphs": False, "kv_dtype": None, "x": 0.5, "n": 3}, unit="s", measured=1)
    assert c.conditions == "caching=on;graphs=off;x=0.5;n=3"
    assert claim("a", "q", unit="s", measured=1).id == "a/q"


@pytest.mark.parametrize("text", ["c", "c=1 2", "c=a|b", "c=1;c=2", "c=1,2", "=3"])
def test_conditions_that_cannot_be_read_again_are_refused(text):
    with pytest.raises(StoreError):
        claim("a", "q", text, unit="s", measured=1)


def test_an_estimate_brings_its_interval_and_its_warning():  # pitfall 16
    c = claim("a", "q", unit="s", measured=stats.mean_interval([1.0, 2.0, 3.0]))
    assert c.measured == 2.0 and c.ci_low < 2.0 < c.ci_high and c.reason is None
    few = claim("a", "q", unit="s", measured=stats.percentile(range(10), 0.95))
    assert few.ci_low is None and few.reason == "n too small (10, needs 72)"
    none = claim("a", "q", unit="s", measured=stats.percentile([], 0.95))
    assert (none.state, none.reason) == ("not measured", "no values")


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"computed": 1.0}, "computed"),
        ({"computed": 1.0, "reason": "no GPU here"}, "not measured"),
        ({"reason": "no GPU here"}, "not measured"),
        ({"reason": "the server died", "failed": True}, "failed"),
        ({"computed": 1.0, "measured": 0.0}, "measured"),
    ],
)
def test_states(values, state):
    assert claim("a", "q", unit="s", **values).state == state


@pytest.mark.parametrize("values", [{}, {"failed": True}, {"computed": 1.0, "failed": True}])
def test_not_measured_and_failed_need_a_reason(values):
    with pytest.raises(StoreError, match="no reason"):
        claim("a", "q", unit="s", **values)


def test_failed_and_measured_at_once_is_refused():
    with pytest.raises(StoreError, match="both"):
        claim("a", "q", unit="s", measured=1.0, failed=True, reason="x")


@pytest.mark.parametrize("value", [float("nan"), np.float64("inf"), "fast"])
def test_what_is_no_number_is_refused_rather_than_stored(value):  # pitfall 5
    for name in ("computed", "measured"):
        with pytest.raises(StoreError, match="a/q"):
            claim("a", "q", unit="s", **{name: value})


def test_no_residual_over_zero_or_nothing():
    assert claim("a", "q", unit="s", computed=0.0, measured=1.0).residual is None
    assert claim("a", "q", unit="s", measured=1.0).residual is None
    assert claim("a", "q", unit="s", computed=2.0, measured=0.0).residual == -1.0


def test_one_spelling_of_a_unit():
    assert claim("a", "q", unit="seconds", measured=1).unit == "s"


# -- the file


def some(section: str, n: int) -> list[claims.Claim]:
    return [claim(section, "q", {"c": 2**i}, unit="s", measured=float(i), runs=("r1", "r2")) for i in range(n)]


def test_claims_come_back_as_they_were(tmp_path):
    made = [
        *some("load", 2),
        claim("load", "computed_only", unit="bytes", computed=1073741824.0),
        claim("load", "missing", unit="s", reason='no "GPU", None\nand n/a'),
        claim("load", "literal", unit="s", reason="None"),
        claim("load", "third", unit="ratio", computed=3.0, measured=1.0),
    ]
    claims.write_section(tmp_path, "load", made)
    found = claims.from_frame(claims.read(tmp_path))
    assert found[:-1] == made[:-1]
    assert found[3].reason == 'no "GPU", None and n/a'
    assert found[-1].residual == pytest.approx(-2 / 3, abs=1e-11)


def test_missing_is_an_empty_field_and_read_as_null_with_the_right_types(tmp_path):  # pitfall 5
    claims.write_section(tmp_path, "load", [claim("load", "q", unit="s", reason="no GPU")])
    assert (tmp_path / "claims.csv").read_text().splitlines()[1] == "load/q,load,q,,,,,,s,,not measured,no GPU,"
    table = claims.read(tmp_path)
    assert table["measured"].isna().all() and str(table.dtypes["measured"]) == "Float64"
    assert str(table.dtypes["reason"]) == "string" and table["runs"].isna().all()


def test_only_the_own_section_is_replaced(tmp_path):
    claims.write_section(tmp_path, "load", some("load", 3))
    claims.write_section(tmp_path, "fp8_kv", some("fp8_kv", 1))
    claims.write_section(tmp_path, "load", some("load", 1))
    assert list(claims.read(tmp_path)["id"]) == ["fp8_kv/q/c=1", "load/q/c=1"]


def test_writing_again_changes_not_a_byte_and_order_of_sections_does_not_matter(tmp_path):
    for folder, order in (("a", ("x", "y")), ("b", ("y", "x", "y"))):
        for section in order:
            claims.write_section(tmp_path / folder, section, some(section, 12))
    assert (tmp_path / "a" / "claims.csv").read_bytes() == (tmp_path / "b" / "claims.csv").read_bytes()
    assert list(claims.read(tmp_path / "a")["conditions"][:3]) == ["c=1", "c=2", "c=4"]  # the order given


def test_duplicates_and_strangers_are_refused_and_nothing_changes(tmp_path):
    claims.write_section(tmp_path, "load", some("load", 1))
    before = (tmp_path / "claims.csv").read_bytes()
    with pytest.raises(StoreError, match="load/q/c=1"):
        claims.write_section(tmp_path, "load", some("load", 1) * 2)
    with pytest.raises(StoreError, match="not a claim of the section load"):
        claims.write_section(tmp_path, "load", some("other", 1))
    assert (tmp_path / "claims.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,section\na,b\n", "has the columns"),
        ("", "not a table"),
        ("{head}\na,a,q,,x,,,,s,,measured,,\n", "computed"),
        ("{head}\na,a,q,,1,,,,s,,guessed,,\n", "guessed"),
        ("{head}\na,a,q,,1,,,,s,,,,\n", "state"),
        ("{head}\n,a,q,,1,,,,s,,measured,,\n", "no id"),
    ],
)
def test_a_file_that_is_not_of_claims_is_refused(tmp_path, text, message):
    (tmp_path / "claims.csv").write_text(text.format(head=",".join(claims.COLUMNS)))
    with pytest.raises(StoreError, match=message):
        claims.read(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("measured", "inf", "no number"),
        ("measured", "-1.25", "residual is 0.25"),
        ("measured", "", "its state is 'measured'"),
        ("state", "computed", "its state is 'computed'"),
        ("computed", "", "computed and measured give None"),
        ("residual", "", "residual is None"),
        ("ci_low", "9", "begins at 9 and ends at 1.5"),
        ("conditions", "c=2", "id is not made of"),
        ("quantity", "itl_p50_s", "id is not made of"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(tmp_path, column, value, message):
    columns = {"id": "load/ttft_p50_s/c=1", "section": "load", "quantity": "ttft_p50_s", "conditions": "c=1"}
    columns |= {"computed": "1", "measured": "1.25", "ci_low": "1", "ci_high": "1.5", "unit": "s", "residual": "0.25"}
    row = dict.fromkeys(claims.COLUMNS, "") | columns | {"state": "measured"}
    for values in (row, row | {column: value}):
        lines = ",".join(claims.COLUMNS), ",".join(values.values())
        (tmp_path / "claims.csv").write_text("\n".join(lines) + "\n")
        if values is row:
            assert len(claims.read(tmp_path)) == 1
    with pytest.raises(StoreError, match=message) as error:
        claims.read(tmp_path)
    assert "row 1 (load/ttft_p50_s/c=1)" in str(error.value) and "--mode replay" in str(error.value)


def test_a_claim_that_stands_twice_is_refused(tmp_path):
    text = claims.to_csv(some("load", 2))
    (tmp_path / "claims.csv").write_text(text + text.splitlines(keepends=True)[2])
    with pytest.raises(StoreError, match="load/q/c=2 stands there twice"):
        claims.read(tmp_path)


def test_no_file_is_no_claims(tmp_path):
    assert list(claims.read(tmp_path).columns) == list(claims.COLUMNS) and len(claims.read(tmp_path)) == 0


WRITER = """
    import sys
    from pathlib import Path
    from kvlab.claims import claim, write_section
    for i in range(15):
        rows = [claim(sys.argv[1], "q", {{"c": k}}, unit="s", measured=float(i)) for k in range(5)]
        write_section(Path({folder!r}), sys.argv[1], rows)
"""


def test_processes_that_write_at_once_lose_no_section(tmp_path):
    code = textwrap.dedent(WRITER.format(folder=str(tmp_path)))
    sections = ["a", "b", "c"]
    writers = [subprocess.Popen([sys.executable, "-c", code, s], env=os.environ) for s in sections]
    assert [w.wait(120) for w in writers] == [0, 0, 0]
    table = claims.read(tmp_path)
    assert table.groupby("section").size().to_dict() == dict.fromkeys(sections, 5)
    assert set(table["measured"]) == {14.0}


def test_machines_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    claims.write_section(store.machine_dir("article"), "load", some("load", 2))
    own = [claim("load", "q", {"c": 2}, unit="s", measured=9.0), claim("load", "new", unit="s", measured=1.0)]
    claims.write_section(store.machine_dir("mine"), "load", own)
    table = claims.side_by_side(["article", "mine"]).set_index("id")
    assert table.loc["load/q/c=2", "article.measured"] == 1.0 and table.loc["load/q/c=2", "mine.measured"] == 9.0
    assert table.loc["load/q/c=1", "mine.measured"] is pd.NA and table.loc["load/new", "article.state"] is pd.NA
    claims.write_section(store.machine_dir("mine"), "load", [claim("load", "q", {"c": 2}, unit="tok/s", measured=9.0)])
    with pytest.raises(StoreError, match="another unit"):
        claims.side_by_side(["article", "mine"])


# -- for human eyes


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.668, "s", "668 ms"),
        (0.0024, "s", "2.4 ms"),
        (5.7, "s", "5,700 ms"),
        (35.4, "s", "35.4 s"),
        (114688.0, "bytes", "114,688 bytes"),
        (1073741824.0, "bytes", "1 GiB"),
        (20 * 2**20, "bytes", "20 MiB"),
        (0.955, "ratio", "95.5%"),
        (-0.23, "ratio", "-23%"),
        (831.4321, "tok/s", "831.4 tok/s"),
        (22048, "tokens", "22,048 tokens"),
        (0.0, "count", "0"),
        (5.4, "x", "5.4×"),
        (-1.513e-7, "s", "-151.3 ns"),
        (4.22e12, "bytes/s", "4.22 Tbytes/s"),
        (7.67e14, "FLOP/s", "767 TFLOP/s"),
        (None, "s", ""),
        (pd.NA, "s", ""),
        (float("nan"), "s", ""),
    ],
)
def test_numbers_as_they_are_drawn(value, unit, text):
    assert claims.number(value, unit) == text


@pytest.mark.parametrize(
    ("quantity", "text"), [("throughput_change", "+9%"), ("gain_throughput", "+9%"), ("hit_ratio", "9%")]
)
def test_what_grows_has_its_sign_and_a_share_has_none(quantity, text):
    found = display.cells(vars(claim("s", quantity, {"c": 1}, measured=0.09, ci=(0.01, 0.2), unit="ratio")))
    assert found["measured"] == text and found["interval"].startswith(text[:-2] + "1% … ")


def test_a_table_of_claims_says_what_is_missing_and_why(tmp_path):
    made = [
        claim("a", "ttft_p50_s", {"c": 1, "in": 2}, unit="s", computed=0.5, measured=0.6, ci=(0.55, 0.65)),
        claim("a", "later", unit="s", computed=0.5, reason="no GPU here"),
    ]
    claims.write_section(tmp_path, "a", made)
    for source in (made, claims.read(tmp_path)):
        table = claims.show(source)
        first, second = table.iloc[0], table.iloc[1]
        assert list(first) == ["c=1, in=2", "500 ms", "600 ms", "550 ms … 650 ms", "+20.0%", ""]
        assert list(second) == ["", "500 ms", "", "", "", "not measured: no GPU here"]
    assert len(claims.show([])) == 0


def test_a_table_that_was_cut_off_is_an_error(tmp_path):
    whole = claims.to_csv(
        [claims.claim("load", "throughput_tok_s", {"c": n}, measured=100.0 + n, unit="tok/s") for n in (1, 2)]
    )
    (tmp_path / claims.FILE).write_text(whole[:-9])
    with pytest.raises(StoreError, match="cut off"):
        claims.read(tmp_path)
