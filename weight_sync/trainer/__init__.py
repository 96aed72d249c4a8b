"""The trainer side of a refit: one endpoint per trainer rank."""
