"""Edits of files, with the file as prediction of the answer and without: `paceline bench edits`."""
