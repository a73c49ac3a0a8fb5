"""The payload: fields as words, the rows that move and come, and checksums of them."""
