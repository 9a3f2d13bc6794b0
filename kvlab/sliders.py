"""Sliders over the pictures of `play`, for JupyterLab; `static` shows the same picture where no widget does."""

from __future__ import annotations

import html
import inspect
import io
import math
import textwrap
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import ipywidgets as widgets
from matplotlib.figure import Figure

from kvlab import geometry, play, play_values
from kvlab.errors import ConfigError, KvlabError


class Control(NamedTuple):
    """One slider: the argument that it moves, its label with the unit, its ends; `log` for ranges of decades."""

    name: str
    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = True


POOL_GIB = Control("pool_gib", "KV pool, GiB", 0.01, 1000, log=True, whole=False)
POOL_TOKENS = Control("pool_tokens", "KV pool, all blocks, tokens", 1000, 1e6, log=True)
BLOCK = Control("block_size", "block, tokens", 8, 128)
INPUT = Control("input_tokens", "input, tokens", 16, 8192)
OUTPUT = Control("output_tokens", "output, tokens", 1, 2048)
PREFILL = Control("prefill_tok_s", "prefill, tok/s", 500, 1e6, log=True)
PREFIX = Control("prefix_tokens", "shared prefix, tokens", 128, 8192)
TAIL = Control("tail_tokens", "own tail, tokens", 1, 2048)
KV_BYTES = Control("kv_bytes", "bytes of a KV element", 1, 4)
RANKS = Control("tensor_parallel", "tensor parallel", 1, 8)
STEP = Control("step_ms", "decode step, ms", 0.5, 60, whole=False)

BOARDS: dict[str, tuple[Callable[..., Figure], tuple[Control, ...]]] = {
    "capacity": (play.capacity, (POOL_GIB, KV_BYTES, BLOCK, INPUT, OUTPUT)),
    "knee": (
        play.knee,
        (
            STEP,
            Control("per_request_ms", "each request adds, ms", 0, 2, whole=False),
            Control("per_ktoken_us", "each 1,000 KV tokens add, µs", 0, 1500, whole=False),
            PREFILL,
            POOL_TOKENS,
            Control("max_num_seqs", "max_num_seqs", 1, 256),
            INPUT,
            OUTPUT,
        ),
    ),
    "hit_ratio": (
        play.hit_ratio,
        (POOL_TOKENS, BLOCK, PREFIX, TAIL, OUTPUT, Control("workers", "workers", 1, 32)),
    ),
    "stall": (play.stall, (Control("chunk_tokens", "chunk, tokens", 64, 16384), INPUT, PREFILL, STEP)),
    "ttft_saved": (
        play.ttft_saved,
        (PREFIX, TAIL, BLOCK, PREFILL, Control("fixed_ms", "fixed part, ms", 0, 100, whole=False)),
    ),
}

# The worker behind a Service is another one than the server of the other sections: it keeps its own pool.
KEPT = {"hit_ratio": {"pool_tokens", "block_size"}}


def start(name: str, machine: str = "") -> dict[str, Any]:
    """The values with which a board starts: the picture's own, and with a machine what that one measured."""
    draw, controls = _board(name)
    own = {key: p.default for key, p in inspect.signature(draw).parameters.items() if p.default is not p.empty}
    known = play_values.values_of(machine) if machine else {}
    wanted = {control.name for control in controls} | {"model"}
    values = own | {key: value for key, value in known.items() if key in wanted - KEPT.get(name, set())}
    if "model" in inspect.signature(draw).parameters:
        values = {"model": "Qwen3-1.7B"} | values
        values["kv_bytes"] = values.get("kv_bytes") or geometry.load(values["model"]).dtype_bytes
    else:
        values.pop("model", None)
    return values


def not_measured(name: str, machine: str, given: Container[str] = ()) -> str:
    """Which sliders of a board a machine did not measure, in words, without those `given`; "" where it did them all."""
    known, wanted = play_values.values_of(machine), _measurable(name)
    lacking = [control.label for control in wanted if control.name not in known and control.name not in given]
    return f"Not measured on {machine}: {'; '.join(lacking)}. The picture's own values stand." if lacking else ""


def _measurable(name: str) -> list[Control]:
    """The sliders of a board whose values a machine can have measured; a worker's pool is its profile's (`start`)."""
    kept = KEPT.get(name, ())
    return [one for one in _board(name)[1] if one.name in play_values.MEASURED and one.name not in kept]


def origins(name: str) -> list[str]:
    """The machines with which a board can start: those that measured a value of its sliders."""
    wanted = {control.name for control in _measurable(name)}
    return [machine for machine in play_values.machines() if wanted & play_values.values_of(machine).keys()]


def static(name: str, machine: str = "", **changes: Any) -> Figure:
    """The board's picture as a plain figure, with some values changed: it shows where no widget does.

    Above it stands what the machine did not measure. Raises ConfigError for a machine without measurements.
    """
    figure = _board(name)[0](**(start(name, machine) | changes))
    if machine and (said := not_measured(name, machine, changes)):
        wrapped = textwrap.fill(said, int(figure.get_figwidth() * 14))
        figure.suptitle(wrapped, fontsize="small", x=0.01, ha="left")
    return figure


def board(name: str, machine: str = "article") -> widgets.VBox:
    """A picture with its sliders; "start from" sets them to what a machine measured, and says what it did not.

    Where no machine measured a value of the sliders there is no "start from". Raises ConfigError on either name.
    """
    draw, controls = _board(name)
    values = start(name, machine)
    sliders = {control.name: _slider(control, values[control.name]) for control in controls}
    others: dict[str, widgets.Widget] = {}
    if "model" in values:
        options = [shape.name for shape in geometry.published()]
        others["model"] = widgets.Dropdown(options=["tiny", *options], value=values["model"], description="model")
    picture, said, lacking = _Picture(draw, sliders | others), widgets.HTML(), widgets.HTML()
    known = origins(name)
    known += [machine] if known and machine not in known else []
    origin = widgets.Dropdown(options=known, value=machine if known else None, description="start from")

    def tell(machine: str) -> None:
        lacking.value = html.escape(not_measured(name, machine))

    def set_out(change) -> None:
        picture.set(start(name, change["new"]))
        tell(change["new"])

    origin.observe(set_out, "value")
    tell(machine)
    picture.said = said
    picture.draw()
    first = [origin, lacking] if known else []
    knobs = [*first, *others.values(), *sliders.values(), said]
    knobs = widgets.VBox(knobs, layout=widgets.Layout(min_width="340px"))
    return widgets.VBox([widgets.HBox([knobs, picture.image], layout=widgets.Layout(flex_flow="row wrap"))])


def own_model(text: str = "") -> widgets.VBox:
    """What the formulas say of the reader's own model: paste its config.json, or give a path or a name."""
    box = widgets.Textarea(
        value=text,
        placeholder="paste config.json here, or write a path or a name such as Qwen3-8B",
        layout=widgets.Layout(width="620px", height="110px"),
    )
    controls = (POOL_GIB, KV_BYTES, RANKS, BLOCK, INPUT, OUTPUT)
    starts = {"pool_gib": 16.0, "kv_bytes": 2, "tensor_parallel": 1, "block_size": 16}
    starts |= {"input_tokens": 512, "output_tokens": 128}
    sliders = {control.name: _slider(control, starts[control.name]) for control in controls}
    table = widgets.HTML()

    def draw(**values: Any) -> Figure:
        table.value = ""
        shape = play_values.read_model(box.value)
        table.value = play_values.what_if(shape, **values).to_html(header=False)
        return play.capacity(shape, **values)

    picture = _Picture(draw, sliders)
    picture.said = widgets.HTML()
    box.observe(lambda _: picture.draw(), "value")
    picture.draw()
    knobs = widgets.VBox([*sliders.values(), picture.said], layout=widgets.Layout(min_width="340px"))
    return widgets.VBox([box, widgets.HBox([knobs, table]), picture.image])


def _board(name: str) -> tuple[Callable[..., Figure], tuple[Control, ...]]:
    if name not in BOARDS:
        raise ConfigError(f"There is no board {name!r}.", next_step=f"use one of: {', '.join(BOARDS)}")
    return BOARDS[name]


class _Picture:
    """An image that is drawn again whenever one of its controls moves; an error is said and the last picture stays."""

    def __init__(self, draw: Callable[..., Figure], controls: dict[str, widgets.Widget]):
        self._draw, self._controls, self._held = draw, controls, False
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.said = widgets.HTML()
        for control in controls.values():
            control.observe(lambda _: self.draw(), "value")

    def set(self, values: dict[str, Any]) -> None:
        """Moves several controls and draws once."""
        self._held = True
        for name, control in self._controls.items():
            if values.get(name) is not None:
                control.value = _within(control, values[name])
        self._held = False
        self.draw()

    def draw(self) -> None:
        if self._held:
            return
        values = {name: _value(control) for name, control in self._controls.items()}
        try:
            self.image.value = png(self._draw(**values))
            self.said.value = ""
        except KvlabError as error:
            self.said.value = f"<pre style='white-space: pre-wrap'>{html.escape(str(error))}</pre>"


def png(figure: Figure) -> bytes:
    """The figure as an image file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _slider(control: Control, value: float) -> widgets.Widget:
    look = {
        "description": control.label,
        "continuous_update": False,
        "style": {"description_width": "160px"},
        "layout": widgets.Layout(width="420px"),
    }
    if control.log:
        made = widgets.FloatLogSlider(
            min=math.log10(control.low), max=math.log10(control.high), step=0.01, readout_format=".4g", **look
        )
    elif control.whole:
        made = widgets.IntSlider(min=int(control.low), max=int(control.high), **look)
    else:
        made = widgets.FloatSlider(min=control.low, max=control.high, step=control.high / 1000, **look)
    made.whole = control.whole
    made.value = _within(made, value)
    return made


def _within(control: widgets.Widget, value: Any) -> Any:
    """The value as the control can hold it."""
    if isinstance(control, widgets.IntSlider):
        return int(min(max(round(value), control.min), control.max))
    if isinstance(control, widgets.FloatLogSlider):
        return float(min(max(value, control.base**control.min), control.base**control.max))
    if isinstance(control, widgets.FloatSlider):
        return float(min(max(value, control.min), control.max))
    return value


def _value(control: widgets.Widget) -> Any:
    whole = getattr(control, "whole", False) and isinstance(control, widgets.FloatLogSlider)
    return round(control.value) if whole else control.value
