"""A thin facade over a fleet of vLLM engines: lifecycle and dispatch, never weight bytes."""
