"""A few events of one's own, in the columns that preprocessing is told of."""

import pyarrow as pa
import pyarrow.parquet as pq

from commons.datasets.sequences.event_columns import EventColumns

COLUMNS = EventColumns("uid", "iid", "ts", "s", ("click", "stars >= 4"), ("gender", "uid"))
EVENTS = {
    "uid": ["b", "a", "b", "b", "c"],
    "iid": [-7, 10**12, 5, -7, 5],
    "ts": [30, 5, 10, 20, 1],
    "click": [True, False, False, True, True],
    "stars": [5.0, 4.0, None, 1.0, 3.0],
    "gender": ["f", None, "m", "m", "f"],
}


def write(path, columns=None, **changes):
    """A parquet file of these events, or of other columns, some of them changed."""
    pq.write_table(pa.table((columns or EVENTS) | changes), path)
    return path
