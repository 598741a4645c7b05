"""What a model's reply consists of, in the words of its chat template: content, reasoning, calls of functions."""
