"""Real processes for tests: trainer ranks with real parameters, engines with real workers."""
