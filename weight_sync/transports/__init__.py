"""How bytes travel: every transport implements ``base`` and passes one contract suite."""
