"""Backends that are each broken in one realistic way, to find out whether the conformance suite notices."""
