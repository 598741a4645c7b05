"""Steps and rounds on a GPU: `python -m benchmarks.gpu`."""
