"""Files that are to be edited, and how fast that is where the file is the prediction of the answer: `paceline bench edits`."""
