"""What describes a public data set, and how its raw files become events, users and items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from commons.datasets.public.raw_files import RawFiles, RawKind, open_raw_files
from commons.datasets.public.raw_tables import Listing, RawTables, TextLayout
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.preprocessing import Preprocessor
from commons.datasets.sequences.writer import SequenceSource


@dataclass(frozen=True)
class PublicDataset:
    """A public data set; `PUBLIC_DATASETS` has them by name."""

    schema: SequenceSchema  # of its columnar files
    raw: RawKind  # the archive
    event_files: tuple[str, ...]  # files of events, in the order in which ties of time are broken
    layout: TextLayout  # of these
    event: Mapping[str, str]  # by column of the store, SQL of the layout's columns
    action_vocabulary_size: int  # actions lie in `[0, action_vocabulary_size)`
    # Files with a line for each "user" or each "item". The columns of users behind the id are contextual features.
    # Without a file, there are those of the events.
    listings: Mapping[str, Listing] = field(default_factory=dict)
    check: Callable[[RawFiles], None] = lambda files: None  # raises ValueError for the files of another data set

    def preprocess(self, source: str | Path, output: str | Path, **options: Any) -> Path:
        """Write the columnar files; arguments and errors as those of `Preprocessor`."""
        return Preprocessor(self.schema.dataset_name, self._read)(source, output, **options)

    def describe(
        self, store: EventStore, listed: Mapping[str, pa.Table], *, generated: bool, sha256: str = ""
    ) -> SequenceSource:
        """What is known of the data set, whose events are in the store.

        Args:
            store: the events.
            listed: the contents of the listings, sorted by id, the first column.
            generated: whether the files say that they were generated.
            sha256: of the archive.
        """
        users = listed.get("user")
        ids = {
            part: listed[part].column(0).combine_chunks() if part in listed else store.values(part)
            for part in ("user", "item")
        }
        return SequenceSource(
            schema=self.schema,
            users=ids["user"],
            context={name: users[name].combine_chunks() for name in users.column_names[1:]}
            if users is not None
            else {},
            items=ids["item"],
            action_vocabulary_size=self.action_vocabulary_size,
            generated=generated,
            sha256=sha256,
        )

    def _read(self, source: Path, store: EventStore) -> SequenceSource:
        names = (*self.event_files, *(listing.file for listing in self.listings.values()))
        files = open_raw_files(self.raw, names, source, store.folder, show_progress=store.show_progress)
        self.check(files)
        tables = RawTables(files, store)
        listed = {part: tables.listed(listing) for part, listing in self.listings.items()}
        tables.add_events(self.event_files, self.layout, self.event)
        for part, listing in self.listings.items():
            tables.require_listed(part, listing, listed[part].column(0))
        if not store.num_rows:
            raise ValueError(f"{files.source} has no interactions in {', '.join(self.event_files)}: download it again")
        return self.describe(store, listed, generated=files.is_generated, sha256=files.sha256)
