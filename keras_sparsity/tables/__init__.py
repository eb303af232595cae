"""Tables of rows: storage, layout, first values."""
