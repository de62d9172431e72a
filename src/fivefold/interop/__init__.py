"""Other frameworks' own files: read as text into a model, a workload and a layout, and written from them."""
