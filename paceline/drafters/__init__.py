"""Every kind of drafter that is a network: heads on the target's hidden states, drafts of its own layers."""
