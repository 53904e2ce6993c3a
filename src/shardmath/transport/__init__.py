"""How can a peer reach this memory? One file per answer, with the verbs of `base.Transport`."""
