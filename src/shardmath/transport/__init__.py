"""How can a peer reach this memory? One file per answer, each with the verbs of `base.Transport`."""
