"""Other builds of the model beside the plain server: the words, and the rows."""

import pytest

from kvlab import explain_variants, plot
from kvlab.claims import claim


def of(variant, c, quantity="variant_itl_p50_s", **values):
    conditions = {"variant": variant, "c": c, "in": 8, "out": 8}
    return claim("load", quantity, conditions, unit="s", **values)


FOUND = [
    of("fp8-weights", 1, computed=0.0018, measured=0.0022),
    of("lora", 1, measured=0.0024),
    of("fp8-weights", 32, computed=0.0028, measured=0.0031),
    of("lora", 32, reason="no run"),
    of("lora", 32, quantity="variant_ttft_p50_s", measured=9.0),
]


def test_each_build_is_told_against_the_plain_server_at_the_same_clients():
    one, many = explain_variants.told({1: 0.002, 32: 0.0031}, FOUND)
    assert one.endswith("1 client, against the plain server: fp8-weights +10% (computed -10%), lora +20%.")
    assert many.endswith("32 clients, against the plain server: fp8-weights +0% (computed -10%).")
    assert explain_variants.told({}, FOUND) == []


def test_one_row_a_build_and_what_is_missing_is_said():
    figure, (axis,) = plot.panels(1)
    explain_variants.draw(axis, 0.0031, [c for c in FOUND if ";c=32;" in c.conditions])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["plain", "fp8-weights", "lora"]
    assert "not measured" in [text.get_text() for text in axis.texts]
    dots = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([3.1, 3.1])
