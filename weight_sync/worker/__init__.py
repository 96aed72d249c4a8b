"""The engine side of a refit, independent of which engine it is."""
