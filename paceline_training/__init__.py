"""Making drafts: text of the target, distillation, checkpoints, held-out acceptance."""
