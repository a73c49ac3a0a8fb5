"""The parquet files of a source, and their columns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from commons.console import reason_of
from commons.datasets.sequences.event_store import sql_text

# Suffixes of files that DuckDB can convert.
_CONVERTIBLE = (".csv", ".tsv", ".json", ".jsonl")
# What a table has in its folder: the log or metadata that say which of its files and rows count.
_TABLES = {"Delta": "_delta_log", "Iceberg": "metadata/[v0-9]*.metadata.json", "Hudi": ".hoodie"}


def find_parquet(source: Path) -> list[Path]:
    """A parquet file, or the files in a folder at any depth, sorted by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: as `require_no_table`.
    """
    if not source.exists():
        raise FileNotFoundError(
            f"{source} does not exist; the source is a parquet file or a folder of parquet files: correct it"
        )
    files = [str(source)] if source.is_file() else []
    # Without names that begin with a dot or an underscore, such as _SUCCESS. A schema is given, so no file is opened.
    if source.is_dir():
        files = sorted(ds.dataset(source, pa.schema([]), "parquet").files)
    if not files:
        raise FileNotFoundError(f"{source} has no parquet file; the source needs at least one: correct it")
    require_no_table(files)
    return each_once(map(Path, files))


def require_no_table(files: Iterable[str | Path]) -> None:
    """Raise ValueError for a file of a Delta, Iceberg or Hudi table, which keeps removed and rewritten rows."""
    for folder in sorted({folder for file in files for folder in Path(os.path.realpath(file)).parents}):
        for name, log in _TABLES.items():
            if any(folder.glob(log)):
                raise ValueError(
                    f"{folder} is a table of {name}, and its files also have rows that were removed or rewritten: "
                    "write the table's rows to another folder as parquet files, with the program that writes the table "
                    "(in Spark, spark.table(…).write.parquet(…)), and give that folder"
                )


def each_once(files: Iterable[Path]) -> list[Path]:
    """The files, each only by its first name: links such as latest -> 2024 lead to the same files."""
    once: dict[str, Path] = {}
    for file in files:
        once.setdefault(os.path.realpath(file), file)
    return list(once.values())


def read_columns(path: Path) -> pa.Schema:
    """The columns of a file; a dictionary column has the type of its values.

    Raises:
        ValueError: no parquet file, or a damaged one.
    """
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        if any(suffix.lower() in _CONVERTIBLE for suffix in path.suffixes):
            reader = "read_json" if ".json" in path.name.lower() else "read_csv"
            # A sample decides on types: if 007 came after it, it would become 7, which may be another user.
            rows = f"FROM {reader}({sql_text(str(path))}, sample_size=-1)"
            copy = f"COPY ({rows}) TO {sql_text(f'{path}.parquet')}"
            raise ValueError(
                f"{path} is no parquet file; a source has only such files: convert it with DuckDB, which is installed, "
                f'and move it elsewhere: python -c "import duckdb; duckdb.sql(\\"{copy}\\")"'
            ) from error
        raise ValueError(
            f"{path} is no parquet file, or damaged ({reason_of(error)}): write it again, or move it elsewhere"
        ) from error
    kinds = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in schema.types)
    return pa.schema(list(zip(schema.names, kinds)))
