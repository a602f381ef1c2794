"""Read and write Parquet and Arrow files in a separate process, so that the command doesn't keep pyarrow in memory.

`arrow_process` runs this file as a script, `arrow_child.py read|write OPTIONS`, and passes the options as JSON. The
process doesn't import any cellama module. The process exchanges JSON lines through stdin and stdout. `read` prints the
column names, followed by each row as a list. `write` reads `[number, row]` for each row of the output. Errors are
objects with the member `error`.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow

ROWS_PER_BATCH = 500  # rows in memory as Python objects: a few MB, also with embeddings
BATCHES_PER_GROUP = 10  # batches in a row group or in a batch of an Arrow file
READ_BUFFER_BYTES = 1 << 18  # per column, instead of the whole column of a row group
EMBEDDING = "embedding"


def main() -> None:
    action, options = sys.argv[1], json.loads(sys.argv[2])
    try:
        if action == "read":
            read(options, sys.stdout.buffer)
        else:
            write(options, sys.stdin.buffer)
    except BrokenPipeError:
        pass  # the command has stopped
    except (pyarrow.ArrowException, OSError, ValueError, ImportError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)


def batches_of(source: dict[str, Any]) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    """Open a file or URL. Return the table's schema and an iterator over its rows in batches."""
    path = source["path"]
    if "://" in path:
        import fsspec

        path = fsspec.open(path, "rb").open()
    if source["format"] == "parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
        return file.schema_arrow, file.iter_batches(batch_size=ROWS_PER_BATCH, use_threads=False)
    stream = pyarrow.memory_map(path) if isinstance(path, str) else pyarrow.PythonFile(path)
    try:
        reader = pyarrow.ipc.open_file(stream)
    except pyarrow.ArrowInvalid:
        stream.seek(0)
        reader = pyarrow.ipc.open_stream(stream)
        return reader.schema, sliced(reader)
    return reader.schema, sliced(reader.get_batch(i) for i in range(reader.num_record_batches))


def sliced(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_PER_BATCH):
            yield batch.slice(start, ROWS_PER_BATCH)


def read(source: dict[str, Any], out: BinaryIO) -> None:
    """Print the column names, followed by the rows."""
    schema, batches = batches_of(source)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ValueError(f"several columns are named {twice[0]!r}; rename all but one")
    out.write(json.dumps(schema.names).encode() + b"\n")
    for batch in batches:
        for row in batch.to_pylist():
            out.write(json.dumps([row[name] for name in schema.names], default=str).encode() + b"\n")
        out.flush()


class Inference:
    """Infers a type for each column from rows in JSON lines."""

    def __init__(self, fixed: dict[str, pyarrow.DataType]) -> None:
        self._fixed = fixed
        self._schema = pyarrow.schema([])
        self._texts: set[str] = set()  # columns with values of different types, which become text
        self.names: dict[str, None] = {}  # in the order of their first rows
        self._dimensions: set[int] = set()

    def add(self, rows: list[dict[str, Any]], embedding: str) -> None:
        self.names |= dict.fromkeys(itertools.chain.from_iterable(rows))
        self._dimensions |= {len(vector_of(row[embedding])) for row in rows if row.get(embedding) is not None}
        for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
            if name in self._texts or name in self._fixed or name == embedding:
                continue
            try:
                found = pyarrow.array([row.get(name) for row in rows]).type
                one = pyarrow.schema([(name, found)])
                self._schema = pyarrow.unify_schemas([self._schema, one], promote_options="permissive")
            except (pyarrow.ArrowException, OverflowError):
                self._texts.add(name)

    def schema(self, embedding: str, last: list[str]) -> pyarrow.Schema:
        """Return the inferred schema. The columns in `last` come last and are included even if no row has them."""
        names = [*(name for name in self.names if name not in last), *last]
        return pyarrow.schema([(name, self._type(name, embedding)) for name in names])

    def _type(self, name: str, embedding: str) -> pyarrow.DataType:
        if name == embedding:
            size = self._dimensions.pop() if len(self._dimensions) == 1 else -1
            return pyarrow.list_(pyarrow.float32(), size)
        if name in self._fixed:
            return self._fixed[name]
        if name in self._texts:
            return pyarrow.string()
        found = self._schema.field(name).type
        return pyarrow.string() if pyarrow.types.is_null(found) else found


def vector_of(value: Any) -> list[float]:
    """Return an embedding as a list, decoding base64 strings of 32-bit floats."""
    if isinstance(value, str):
        numbers = array("f")
        numbers.frombytes(base64.b64decode(value))
        return numbers.tolist()
    return list(value)


def column_of(rows: list[dict[str, Any]], field: pyarrow.Field, embedding: str) -> pyarrow.Array:
    values = [row.get(field.name) for row in rows]
    if field.name == embedding:
        values = [None if value is None else vector_of(value) for value in values]
    elif pyarrow.types.is_string(field.type):
        values = [json.dumps(v, ensure_ascii=False) if v is not None and not isinstance(v, str) else v for v in values]
    return pyarrow.array(values, field.type)


def write(options: dict[str, Any], stdin: BinaryIO) -> None:
    """Write the rows from stdin to a file.

    If there is an `input`, each output row also contains the columns of the input row with the same number.
    """
    fixed = {name: pyarrow.type_for_alias(alias) for name, alias in options["types"].items()}
    embedding = options[EMBEDDING]
    inference = Inference(fixed)
    with tempfile.TemporaryFile(dir=options["directory"]) as spool:
        for raws in batched(stdin, ROWS_PER_BATCH):
            spool.writelines(raws)
            inference.add([json.loads(raw)[1] for raw in raws], embedding)
        spool.seek(0)
        added = inference.schema(embedding, options["columns"])
        rows = (json.loads(raw) for raw in spool)
        source = options["input"]
        if source is None:
            tables = (table_of([row for _, row in page], added, embedding) for page in batched(rows, ROWS_PER_BATCH))
            write_tables(options, added, tables)
        else:
            schema, batches = batches_of(source)
            ids = [field for field in added if field.name == options["id"] and field.name not in schema.names]
            results = [field for field in added if field.name in options["columns"]]
            whole = pyarrow.schema([*ids, *schema, *results], metadata=schema.metadata)
            if options["format"] == "arrow" and source["format"] == "parquet":
                whole = without_dictionaries(whole)
            write_tables(options, whole, merged(batches, rows, whole, pyarrow.schema([*ids, *results]), embedding))


def without_dictionaries(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema with plain columns instead of dictionary-encoded columns.

    An Arrow file allows only one dictionary per column.
    """
    fields = [
        field.with_type(field.type.value_type) if pyarrow.types.is_dictionary(field.type) else field for field in schema
    ]
    return pyarrow.schema(fields, metadata=schema.metadata)


def merged(
    batches: Iterator[pyarrow.RecordBatch],
    rows: Iterator[tuple[int, dict[str, Any]]],
    schema: pyarrow.Schema,
    added: pyarrow.Schema,
    embedding: str,
) -> Iterator[pyarrow.Table]:
    """Yield the input rows that have results, together with their results."""
    start, waiting = 1, next(rows, None)
    for batch in batches:
        found = []
        while waiting is not None and waiting[0] < start + batch.num_rows:
            found.append(waiting)
            waiting = next(rows, None)
        if found:
            table = pyarrow.Table.from_batches([batch]).take([number - start for number, _ in found])
            results = [row for _, row in found]
            for place, field in enumerate(schema):
                if field.name in added.names:
                    table = table.add_column(place, field, column_of(results, field, embedding))
            yield table.cast(schema)
        start += batch.num_rows
    if waiting is not None:
        raise ValueError("the input has fewer rows than when the run first read it")


def table_of(rows: list[dict[str, Any]], schema: pyarrow.Schema, embedding: str) -> pyarrow.Table:
    return pyarrow.table([column_of(rows, field, embedding) for field in schema], schema=schema)


def write_tables(options: dict[str, Any], schema: pyarrow.Schema, tables: Iterable[pyarrow.Table]) -> None:
    """Write tables to a file as row groups."""
    if options["format"] == "parquet":
        from pyarrow import parquet

        writer = parquet.ParquetWriter(options["path"], schema)
    else:
        writer = pyarrow.ipc.new_file(options["path"], schema)
    with writer:
        for group in batched(tables, BATCHES_PER_GROUP):
            writer.write_table(pyarrow.concat_tables(group).combine_chunks())


def batched(values: Iterable[Any], count: int) -> Iterator[list[Any]]:
    remaining = iter(values)
    while page := list(itertools.islice(remaining, count)):
        yield page


if __name__ == "__main__":
    main()
