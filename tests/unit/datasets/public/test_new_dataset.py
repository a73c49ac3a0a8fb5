"""A data set that is added as CONTRIBUTING says, whose raw file is odd but legal."""

from functools import partial

import numpy as np
import pyarrow.parquet as pq

from commons.datasets.public.dataset import PublicDataset, TextLayout
from commons.datasets.public.raw_files import RawKind
from commons.datasets.sequences.file import SequenceSchema

SHELF = PublicDataset(
    schema=SequenceSchema("shelf", ("user_id",), "book", "order", (partial(np.less_equal, 1),)),
    raw=RawKind("Shelf", "shelf.zip", "shelf"),
    event_files=("log 1.csv",),
    layout=TextLayout("a log", {"reader": "VARCHAR", "book": "INTEGER", "order": "SMALLINT", 'Read-"At"': "BIGINT"}),
    event={"user": "reader", "item": "book", "action": '"order"', "time": '"Read-""At"""'},
    action_vocabulary_size=2,
)


def test_columns_may_have_names_that_are_none_in_sql(tmp_path):
    text = '\ufeff"Read-""At""",reader,"order",x,book\r\n20,"a, b",1,,7\r\n\r\n-5,"a, b",0,é,9\r\n1,c,1,,7'
    (tmp_path / "log 1.csv").write_text(text, encoding="utf-8", newline="")
    SHELF.preprocess(tmp_path, tmp_path / "out")
    users = pq.read_table(tmp_path / "out" / "shelf.parquet").sort_by("user_id").to_pylist()
    assert [(each["book"], each["order"], each["timestamp"]) for each in users] == [
        ([1, 0], [0, 1], [-5, 20]),
        ([0], [1], [1]),
    ]
