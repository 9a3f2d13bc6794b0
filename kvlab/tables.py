"""The two tables of a run as Parquet bytes: columns checked, dtypes cast, small on disk."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.errors import StoreError
from kvlab.records import REQUEST_COLUMNS, SAMPLE_COLUMNS

COLUMNS = {"requests": REQUEST_COLUMNS, "samples": SAMPLE_COLUMNS}
TIMES, TOKENS = "event_times_s", "event_tokens"
# In the file the event times are whole microseconds: as differences of integers they take a quarter of the space.
TIMES_IN_FILE = "event_times_us"


def checked(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """A copy of `frame` with exactly the columns of `kind` ("requests" or "samples"), in order, cast.

    Times are rounded to microseconds; NaN and infinity become null. Raises StoreError that names each wrong column.
    """
    columns = COLUMNS[kind]
    unknown = [str(name) for name in frame.columns if name not in columns]
    missing = [name for name in columns if name not in frame.columns]
    if unknown or missing or len(frame.columns) != len(columns):
        said = "; ".join(
            f"{word}: {', '.join(names)}" for word, names in (("unknown", unknown), ("missing", missing)) if names
        )
        raise StoreError(
            f"The {kind} table has the wrong columns ({said or 'a column stands twice'}).",
            next_step="fill exactly the columns that kvlab/records.py lists",
        )
    cast = {name: _column(frame[name], name, dtype, kind) for name, (dtype, _) in columns.items()}
    table = pd.DataFrame(cast).reset_index(drop=True)
    if kind == "requests":
        _check_events(table)
    return table


def _column(column: pd.Series, name: str, dtype: str, kind: str) -> pd.Series:
    if dtype == "object":
        return column.map(lambda cell: _list(cell, name)).astype("object")
    try:
        cast = column.astype(dtype)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"Column {name} of the {kind} table cannot be stored as {dtype}: {error}",
            next_step=f"its meaning is: {COLUMNS[kind][name][1]}",
        ) from None
    if dtype != "Float64":
        return cast
    numbers = cast.to_numpy(dtype=float, na_value=np.nan)
    numbers = np.round(numbers, 6) if name.endswith("_s") else numbers
    return pd.Series(pd.array(np.where(np.isfinite(numbers), numbers, np.nan), dtype="Float64"), index=column.index)


def _list(cell, name: str) -> list | None:
    if cell is None or cell is pd.NA or (isinstance(cell, float) and np.isnan(cell)):
        return None
    values = np.asarray(cell, dtype=float)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise StoreError(f"Column {name} holds {cell!r}; a flat list of finite numbers belongs there.")
    return [round(v, 6) for v in values.tolist()] if name == TIMES else [int(v) for v in values.tolist()]


def _check_events(table: pd.DataFrame) -> None:
    for row, (times, tokens) in enumerate(zip(table[TIMES], table[TOKENS], strict=True)):
        if times is not None and tokens is not None and len(times) != len(tokens):
            raise StoreError(
                f"Row {row} of the requests table has {len(times)} event times but {len(tokens)} token counts.",
                cause="an event was stamped without being counted, or the other way round",
            )


def to_bytes(frame: pd.DataFrame, kind: str) -> bytes:
    """The checked table as a zstd-compressed Parquet file."""
    table = checked(frame, kind)
    if kind == "requests":
        micros = table[TIMES].map(lambda cell: None if cell is None else [round(t * 1e6) for t in cell])
        table = table.rename(columns={TIMES: TIMES_IN_FILE}).assign(**{TIMES_IN_FILE: micros})
    schema = pa.schema([(name, _arrow(str(dtype), name)) for name, dtype in table.dtypes.items()])
    arrow = pa.Table.from_pandas(table, schema=schema, preserve_index=False).replace_schema_metadata(None)
    buffer = io.BytesIO()
    lists = {f"{TIMES_IN_FILE}.list.element": "DELTA_BINARY_PACKED"} if kind == "requests" else None
    plain = [name for name in schema.names if name != TIMES_IN_FILE] if lists else True
    pq.write_table(arrow, buffer, compression="zstd", use_dictionary=plain, column_encoding=lists)
    return buffer.getvalue()


def _arrow(dtype: str, name: str) -> pa.DataType:
    if name in (TIMES_IN_FILE, TOKENS):
        return pa.list_(pa.int64())
    return {"Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_()}.get(dtype, pa.string())


def from_bytes(data: bytes, kind: str) -> pd.DataFrame:
    """The table that `to_bytes` wrote, with the dtypes of records.py. Raises StoreError on damage."""
    try:
        arrow = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"The {kind} table cannot be read: {error}", cause="the file is damaged") from None
    # Through Python values: pandas would turn nullable integers into floats on its way.
    table = pd.DataFrame(
        {name: pd.Series(arrow.column(name).to_pylist(), dtype="object") for name in arrow.column_names}
    )
    if kind == "requests" and TIMES_IN_FILE in table.columns:
        seconds = table[TIMES_IN_FILE].map(lambda cell: None if cell is None else [t / 1e6 for t in cell])
        table = table.rename(columns={TIMES_IN_FILE: TIMES}).assign(**{TIMES_IN_FILE: seconds})
        table[TIMES] = table.pop(TIMES_IN_FILE)
    return checked(table, kind)
