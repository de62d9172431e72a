"""One file per kind of sublayer: the rows that it adds to a block's ledger. estimate/blocks.py puts them together."""
