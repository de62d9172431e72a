"""What the commands print: rich renderables made from the library's structs, 100 columns at most."""
