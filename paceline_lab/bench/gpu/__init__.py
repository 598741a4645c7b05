"""Steps and rounds on a GPU: `python -m paceline_lab.bench.gpu`."""
